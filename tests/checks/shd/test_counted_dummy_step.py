import pytest

from distdiag.checks.shd.counted_dummy_step import CountedDummyStep
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from tests.checks.models import optimizers
from tests.checks.verdicts import findings

COUNTED = {"num_steps": 1, "num_zero_steps": 1, "least_count": 1, "greatest_count": 1}


def test_a_step_with_zeros_that_is_counted_is_found():
    (finding,) = findings(CountedDummyStep, optimizers(COUNTED, COUNTED))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)
    assert finding.subjects == ("AdamW",)
    assert "AdamW counts 1 steps, 1 of them with gradients that were all zero" in finding.message


@pytest.mark.parametrize(
    "other",
    [{}, {**COUNTED, "num_zero_steps": 0}, {**COUNTED, "least_count": 0}],
    ids=["healthy", "no-zeros", "reset"],
)
def test_zeros_that_only_some_ranks_have_counted_came_from_their_data(other):
    assert not findings(CountedDummyStep, optimizers(COUNTED, other))
    assert not findings(CountedDummyStep, optimizers(other, COUNTED))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {**COUNTED, "least_count": 0},
        {**COUNTED, "least_count": -1},
        {**COUNTED, "num_zero_steps": 0},
        {"num_steps": 3, "num_zero_steps": 3, "least_count": 3},
    ],
    ids=["healthy", "reset", "without-counter", "no-zeros", "always-zero"],
)
def test_other_counters_are_silent(change):
    assert not findings(CountedDummyStep, optimizers(change, change))
