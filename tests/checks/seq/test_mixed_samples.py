import pytest

from distdiag.checks.seq.mixed_samples import MixedSamples
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.sequences import ModelEquality
from tests.checks.feeds import model_fed
from tests.checks.sequences import both, shared
from tests.checks.verdicts import findings


def fed(number, **values):
    return {rank: model_fed(rank, number, **values) for rank in (0, 1)}


def judged(*feeds, **values):
    view = shared(both(0), both(1), feeds=feeds, **values)
    return findings(MixedSamples, view)


def test_ranks_that_draw_different_samples_are_named():
    (finding,) = judged(fed(0), fed(1))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert "draw different samples in 2 of 2 steps" in finding.message
    assert finding.location.line == 20


def test_a_loader_that_reads_in_order_may_give_parts_of_one_text():
    stream = "Texts 0 by BatchSampler of SequentialSampler"
    (finding,) = judged(fed(0, stream=stream), fed(1, stream=stream))
    assert finding.severity is Severity.INFO


def test_samples_that_attend_to_gathered_ones_may_be_meant():
    (finding,) = judged(fed(0), fed(1), how="all_gather")
    assert finding.severity is Severity.INFO
    assert "unless samples are meant to attend to those of other ranks" in finding.message


SAME = [fed(n, batch=f"indices {n}", samples=(f"samples {n}",)) for n in (0, 1)]


@pytest.mark.parametrize(
    ("feeds", "values"),
    [
        (SAME, {}),
        ([fed(n, batch=f"indices {n}") for n in (0, 1)], {}),
        ([fed(n, num_batch=8) for n in (0, 1)], {}),
        ([fed(0)], {}),
        ([fed(0), fed(1)], {"is_fed_by_others": True}),
        ([fed(0), fed(1)], {"equality": ModelEquality.OTHER_MODELS}),
    ],
    ids=["same", "parts of the same", "another size", "one step", "exchanged", "other models"],
)
def test_samples_that_are_right_or_say_nothing_are_silent(feeds, values):
    assert not judged(*feeds, **values)
