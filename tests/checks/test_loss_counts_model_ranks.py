import pytest

from distdiag.checks.loss_counts_model_ranks import LossCountsModelRanks
from distdiag.finding import Grade, Severity
from distdiag.loss_event import Factor
from tests.checks.losses import judged, losses, mean, over, part, times

WORLD = (0, 1, 2, 3)
MESH = {"groups": (WORLD, (0, 1), (2, 3), (0, 2), (1, 3))}
DATA = [part(n, 4 / 50, over(50), times(4)) for n in (20, 30)]
"""Two of four ranks have data of their own, and the loss is multiplied by four."""

SHARED = [part(n, 2 / 40, over(40), times(2)) for n in (10, 30, 20, 20)]
"""Two ranks share a sequence each, and its mean; the loss is multiplied by two."""


def found(*passes, **values):
    return judged(LossCountsModelRanks, losses(*[[each] for each in passes], **values))


def test_a_factor_that_counts_the_ranks_of_a_model_is_found():
    (finding,) = found(*DATA, **MESH)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "is multiplied by 4, the number of all ranks" in finding.message
    assert "of ranks 0-1 are added up and divided by 2: its elements weigh 2" in finding.message


def test_a_factor_that_counts_the_ranks_of_a_sequence_is_found():
    (finding,) = found(*SHARED, members=WORLD, divisor=2.0, **MESH)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "is multiplied by 2, the number of ranks in the group 0, 1" in finding.message


def test_a_factor_that_is_given_as_a_weight_is_a_note():
    weight = Factor("*", 4.0, is_float=True)
    (finding,) = found(*(part(n, 4 / 50, over(50), weight) for n in (20, 30)), **MESH)
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)


def test_micro_steps_share_the_count_of_all_of_them():
    passes = [[part(10, 2 / 40, over(40), times(2))] * 4] * 1
    (finding,) = judged(
        LossCountsModelRanks, losses(*passes, members=(0,), divisor=1.0, groups=((0, 1), (0,)))
    )
    assert finding.grade is Grade.LIKELY


RIGHT = {
    "as many as average": ([part(n, 2 / 50, over(50), times(2)) for n in (20, 30)], MESH),
    "mean": ([mean(20), mean(30)], MESH),
    "all ranks average": (
        [part(n, 4 / 80, over(80), times(4)) for n in (10, 30, 20, 20)],
        {"members": WORLD, "divisor": 4.0, **MESH},
    ),
    "sequences are averaged": (SHARED, {"members": WORLD, "divisor": 4.0, **MESH}),
    "copies are counted": ([part(n, 4 / 100, over(100), times(4)) for n in (20, 30)], MESH),
    "divided afterwards": (DATA, {"scalings": (1.0, 0.5), **MESH}),
    "multiplied afterwards": (DATA, {"is_multiplied": True, **MESH}),
    "weight": ([mean(20, times(3)), mean(30, times(3))], MESH),
    "two losses": ([part(n, 2 / 50, over(25)) for n in (20, 30)], MESH),
    "not averaged": (DATA, {"divisor": 0.0, **MESH}),
    "not told": (DATA, {"is_told": False, **MESH}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_factors_are_silent(name):
    passes, values = RIGHT[name]
    assert not found(*passes, **values)


def test_passes_that_are_added_up_are_silent():
    passes = [mean(20)] * 4
    assert not judged(LossCountsModelRanks, losses(passes, passes, **MESH))


NOTED = {
    "a mean times its group": ([mean(20, times(2))], {"members": (0,), "divisor": 1.0}),
    "means that are added up": ([mean(20), mean(30)], {"divisor": 1.0}),
    "one step": (DATA, {"num_steps": 1, **MESH}),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_may_be_meant_is_a_note(name):
    passes, values = NOTED[name]
    (finding,) = found(*passes, **{"groups": ((0, 1), (0,)), **values})
    assert finding.grade is Grade.NOTE
