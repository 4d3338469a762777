"""The same step of an optimizer on all ranks."""

from __future__ import annotations

from distdiag.engine.models.optimizers import MOST_OPEN, OptimizerSteps
from distdiag.events.ranks import RankSet
from tests.checks.models import optimizer_state


def steps(*fields, world=2):
    """What comes of the states of optimizers, in this order, and what is left at the end."""
    optimizers = OptimizerSteps(RankSet(range(world)))
    found = [optimizers.add(optimizer_state(**each)) for each in fields]
    return [each for each in found if each is not None], list(optimizers.rest())


def test_a_step_is_shown_when_all_ranks_have_told_it():
    (alignment,), rest = steps({"rank": 1}, {"rank": 0})
    assert alignment.key == ("AdamW", 3)
    assert alignment.present_ranks == RankSet([0, 1])
    assert not rest


def test_steps_and_optimizers_are_kept_apart():
    fields = [{}, {"optimizer": "SGD"}, {"step": 4}, {"rank": 1, "step": 4}]
    (alignment,), rest = steps(*fields)
    assert alignment.key == ("AdamW", 4)
    assert [each.key for each in rest] == [("AdamW", 3), ("SGD", 3)]
    assert all(each.expected_ranks == RankSet([0]) for each in rest)


def test_steps_that_wait_in_vain_are_given_up():
    _, rest = steps(*[{"step": step} for step in range(MOST_OPEN + 5)])
    assert [each.key[1] for each in rest] == list(range(5, MOST_OPEN + 5))


def test_a_step_waits_only_for_those_that_keep_the_model_together():
    pair = (1, 3)
    (alignment,), rest = steps(
        {"rank": 1, "members": pair}, {"rank": 3, "members": pair}, {"rank": 0}, world=4
    )
    assert alignment.present_ranks == RankSet(pair)
    assert [each.present_ranks for each in rest] == [RankSet([0])]


def test_one_rank_that_knows_the_members_is_enough():
    (alignment,), rest = steps({"rank": 0}, {"rank": 1, "members": (0, 1)}, world=4)
    assert alignment.present_ranks == RankSet([0, 1])
    assert not rest


def test_without_members_a_step_waits_for_the_world():
    found, rest = steps(*[{"rank": rank} for rank in (0, 1, 2)], world=4)
    assert not found
    assert [each.present_ranks for each in rest] == [RankSet([0, 1, 2])]
