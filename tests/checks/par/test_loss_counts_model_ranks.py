import pytest

from distdiag.checks.par.loss_counts_model_ranks import LossCountsModelRanks
from distdiag.events.base import CallSite, Frame
from distdiag.events.losses import Factor
from distdiag.findings.finding import Grade, Severity
from tests.checks.losses import losses, mean, over, part, times
from tests.checks.sequences import both, passed, shared
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings

WORLD = (0, 1, 2, 3)
MESH = {"groups": (WORLD, (0, 1), (2, 3), (0, 2), (1, 3))}
DATA = [part(n, 4 / 50, over(50), times(4)) for n in (20, 30)]
"""Two of four ranks have data of their own, and the loss is multiplied by four."""

SHARED = [part(n, 2 / 40, over(40), times(2)) for n in (10, 30, 20, 20)]
"""Two ranks share a sequence each, and its mean; the loss is multiplied by two."""


def scaled(loss, world_size):
    """Show a source that multiplies by a number of ranks: that of `COUNTED`."""
    return loss * world_size


COUNTED = CallSite((Frame(__file__, 1, "main"),))


def found(*passes, **values):
    values.setdefault("site", COUNTED)
    return findings(LossCountsModelRanks, losses(*[[each] for each in passes], **values))


def test_a_factor_that_counts_the_ranks_of_a_model_is_found():
    (finding,) = found(*DATA, **MESH)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "is multiplied by 4, the number of all ranks" in finding.message
    assert (
        "of ranks 0-1 are added up and divided by 2: the weights of its elements add up to 2"
        in finding.message
    )


def test_a_factor_that_counts_the_ranks_of_a_sequence_is_found():
    (finding,) = found(*SHARED, members=WORLD, divisor=2.0, **MESH)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "is multiplied by 2, the number of ranks in the group 0, 1" in finding.message


def test_a_factor_that_is_given_as_a_weight_is_a_note():
    weight = Factor("*", 4.0, is_float=True)
    (finding,) = found(*(part(n, 4 / 50, over(50), weight) for n in (20, 30)), **MESH)
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)


def test_a_factor_whose_source_is_not_seen_is_a_note():
    (finding,) = found(*DATA, site=plain_site(50), **MESH)
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)


def test_micro_steps_share_the_count_of_all_of_them():
    passes = [[part(10, 2 / 40, over(40), times(2))] * 4] * 1
    groups = {"groups": ((0, 1), (0,)), "site": COUNTED}
    (finding,) = findings(
        LossCountsModelRanks, losses(*passes, members=(0,), divisor=1.0, **groups)
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
    "not told": (DATA, {"has_wrapper": False, **MESH}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_factors_are_silent(name):
    passes, values = RIGHT[name]
    assert not found(*passes, **values)


def test_passes_that_are_added_up_are_silent():
    passes = [mean(20)] * 4
    assert not findings(LossCountsModelRanks, losses(passes, passes, **MESH))


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


OWN = [mean(12, num_elements=20), mean(18, num_elements=20)]
"""Two ranks have 20 of 40 tokens each, and the mean over those of them that count."""

ALL = [part(n, 2 / 30, over(30), times(2), num_elements=20) for n in (12, 18)]
"""The same, with a mean over the tokens of both that is multiplied by two."""

BY_HAND = {"divisor": 1.0, "groups": ((0, 1),), "is_measured": True}


def test_means_of_parts_that_are_added_up_are_found_where_ranks_share_a_sequence():
    (finding,) = found(*OWN, sequences=(shared(both(0)),), **BY_HAND)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "own part of a sequence that ranks 0-1 share, but the gradients" in finding.message
    assert "add up to 2, not 1" in finding.message


def test_means_of_parts_are_found_in_each_of_several_sequences():
    pairs = [shared([passed(rank, 0, members=pair) for rank in pair]) for pair in ((0, 1), (2, 3))]
    (finding,) = found(
        *OWN, *OWN, members=WORLD, divisor=2.0, groups=(WORLD,), sequences=tuple(pairs)
    )
    assert finding.grade is Grade.LIKELY
    assert "that ranks 0-1 share, but the gradients of ranks 0-3" in finding.message


def test_a_factor_of_ranks_that_share_a_sequence_is_found_where_gradients_are_added_by_hand():
    (finding,) = found(*ALL, sequences=(shared(both(0)),), **BY_HAND)
    assert finding.grade is Grade.LIKELY
    assert "is multiplied by 2" in finding.message


MEANT = {
    "data of its own": (OWN, ()),
    "whole sequences": ([mean(24, num_elements=40)] * 2, (shared(both(0)),)),
    "tokens not known": (OWN, (shared(both(0, num_tokens=-1)),)),
    "other ranks share": (OWN, (shared([passed(0, 0, members=(0,))]),)),
    "figures": ([mean(1, num_elements=1, kind="dense")] * 2, (shared(both(0)),)),
    "a weight of two": (ALL, ()),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_a_program_may_mean_that_adds_up_by_hand_is_a_note(name):
    passes, sequences = MEANT[name]
    (finding,) = found(*passes, sequences=sequences, **BY_HAND)
    assert finding.grade is Grade.NOTE


def test_parts_that_are_averaged_are_silent():
    assert not found(*OWN, sequences=(shared(both(0)),), **{**BY_HAND, "divisor": 2.0})


def test_means_of_parts_that_are_multiplied_and_averaged_are_found():
    passes = [mean(n, times(2), num_elements=20) for n in (12, 18)]
    values = {"divisor": 2.0, "groups": ((0, 1),), "sequences": (shared(both(0)),)}
    (finding,) = found(*passes, **values)
    assert finding.grade is Grade.LIKELY
    assert "is multiplied by 2, the number of ranks in the group 0, 1" in finding.message
    assert "of ranks 0-1 are added up and divided by 2" in finding.message


@pytest.mark.parametrize(("is_measured", "num_found"), [(True, 1), (False, 0)])
def test_what_is_found_without_sequences_is_not_found_again_with_them(is_measured, num_found):
    values = BY_HAND | {"sequences": (shared(both(0)),), "is_measured": is_measured}
    assert len(found(*ALL, **values)) == num_found
