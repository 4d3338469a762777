import pytest

from distdiag.checks.moe.rerouted_recompute import ReroutedRecompute
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.routing import RepeatedRouting, Rerouting
from tests.checks.routing import rerouting, routing, view
from tests.checks.verdicts import findings


def judged(*reroutings):
    return findings(ReroutedRecompute, view(routing(), reroutings=reroutings, kind=RepeatedRouting))


def test_a_repeated_pass_that_routes_otherwise_is_named():
    (finding,) = judged(rerouting(0), rerouting(1), rerouting(1, layer="layers.1.gate"))
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.PROVEN)
    assert (finding.ranks, finding.location.line) == (RankSet([0, 1]), 10)
    assert finding.subjects == ("layers.0.gate", "layers.1.gate")
    assert "given the same tokens: 3 of 8 repeated choices" in finding.message


@pytest.mark.parametrize(
    ("values", "how"),
    [
        ({}, "the same scores, but different indices"),
        ({"scores": "others"}, "the same tokens, but different scores"),
        ({"scores": "others", "given": "others"}, "different tokens and scores"),
    ],
)
def test_the_evidence_says_where_the_passes_part(values, how):
    (finding,) = judged(rerouting(**values))
    assert how in finding.evidence[0].summary


def test_activations_that_are_not_the_same_are_said_to_be_so():
    (finding,) = judged(rerouting(given="others"))
    assert "given activations that are not quite the same" in finding.message


def test_gates_that_draw_other_random_numbers_are_reported_less_surely():
    drawn = Rerouting(routing(is_recompute=True, chosen="others"), (routing(is_random=True),))
    (finding,) = judged(drawn)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "draws other random numbers" in finding.message
    (finding,) = judged(drawn, rerouting(0))
    assert finding.severity is Severity.ERROR
    assert "random" not in finding.message


def test_numbers_that_only_the_repeated_pass_draws_are_not_meant():
    assert judged(rerouting(is_random=True))


def test_passes_that_are_repeated_alike_are_silent():
    assert not judged()
