import pytest

from distdiag.checks.moe.recounted_tokens import RecountedTokens
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.routing import Recount, RepeatedRouting
from tests.checks.routing import counter, view
from tests.checks.streams import Program
from tests.checks.verdicts import findings


def judged(*recounts):
    return findings(RecountedTokens, view(recounts=recounts, kind=RepeatedRouting))


def recount(rank=0, **values):
    again = counter(rank, is_recompute=True, after="counted twice", **values)
    return Recount(again, (counter(rank),))


def test_a_counter_that_a_repeated_pass_changes_again_is_named():
    (finding,) = judged(recount(0), recount(1))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert (finding.location.line, finding.subjects) == (12, ("layers.0.tokens_per_expert",))


@pytest.mark.parametrize(
    ("line", "is_meant"),
    [
        ("tokens_per_expert = layer.tokens_per_expert // 2", True),
        ("update = (mean - tokens_per_expert).sign()", True),
        ("width = hidden // 2", False),
        ("tokens_per_expert = layer.tokens_per_expert / 20", False),
    ],
)
def test_where_counts_are_halved_or_only_compared_it_is_a_note(tmp_path, line, is_meant):
    program = Program(tmp_path, line)
    (finding,) = judged(recount(site=program.site(line)))
    assert (finding.grade is Grade.NOTE) == is_meant


def test_counters_that_stay_as_they_are_are_silent():
    assert not judged()
