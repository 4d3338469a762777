"""What the samples at an optimizer say together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from distdiag.engine.models.optimizers import Untrained
from distdiag.engine.side_by_side import MOST_OPEN, SideBySide
from distdiag.events.models import MOST_NAMES, ReplicaEvidence, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.views.models import UntrainedView
from tests.checks.models import optimizer_state, plan

PAIR = (0, 1)


def tower(**values: object) -> TensorPlan:
    return plan("tower", **{"owners": ("AdamW",), "replicas": PAIR, **values})


TOWER = tower()


def views(
    *samples: tuple[Iterable[str], ...], plans: Any = (TOWER,), **state: object
) -> list[UntrainedView]:
    """The views of samples, each of which says what rank 0, 1, … have no gradient for.

    `plans` are those of all ranks, or a function of the rank.
    """
    untrained = Untrained()
    of = plans if callable(plans) else lambda rank: plans
    for step, lacking in enumerate(samples):
        for rank, names in enumerate(lacking):
            fields = {"without_gradient": tuple(names), "members": PAIR, "step": step}
            untrained.add(optimizer_state(rank, **{**fields, **state}))
    return list(untrained.views(of))


def test_what_had_no_gradient_at_any_look_is_shown():
    (view,) = views((["a", "b"], ["b", "a"]), (["a"], ["a", "c"]))
    assert view.never == {0: ("a",), 1: ("a",)}
    assert (view.parted, view.num_samples) == ({}, 2)


def test_copies_with_and_without_a_gradient_part():
    (view,) = views(((), ["tower"]), ((), ["tower"]))
    assert view.parted == {"tower": RankSet([0])}


def test_it_is_enough_that_those_with_a_gradient_reduce_it():
    reported = {
        0: [tower(evidence=ReplicaEvidence.REDUCED)],
        1: [tower(evidence=ReplicaEvidence.WORLD)],
    }
    (view,) = views(((), ["tower"]), ((), ["tower"]), plans=reported.get)
    assert view.parted == {"tower": RankSet([0])}
    reported = {
        0: [tower(evidence=ReplicaEvidence.WORLD)],
        1: [tower(evidence=ReplicaEvidence.REDUCED)],
    }
    (view,) = views(((), ["tower"]), ((), ["tower"]), plans=reported.get)
    assert not view.parted


@pytest.mark.parametrize(
    "plans",
    [
        [],
        [tower(evidence=ReplicaEvidence.WORLD)],
        [tower(evidence=ReplicaEvidence.UNSYNCED)],
        [tower(replicas=(0,))],
        [tower(owners=("SGD",))],
        [tower(wrapper="FSDP1")],
        [tower(is_late=True)],
    ],
    ids=["no-plan", "guessed", "unsynced", "own-part", "other-owner", "fsdp1", "late"],
)
def test_ranks_that_differ_do_not_part_where_nothing_tells_that_they_hold_copies(plans):
    (view,) = views(((), ["tower"]), ((), ["tower"]), plans=plans)
    assert view.never == {0: (), 1: ("tower",)}
    assert not view.parted


def test_what_a_rank_trains_at_times_has_not_parted():
    (view,) = views(((), ["tower"]), (["tower"], ["tower"]))
    assert not view.parted


@pytest.mark.parametrize(
    "samples",
    [
        [(["a"], ["a"])],
        [(["a"], ["a"]), (["b"], ["b"])],
        [((), ()), ((), ())],
    ],
    ids=["one-sample", "in-turns", "all-trained"],
)
def test_what_proves_nothing_is_not_shown(samples):
    assert not views(*samples)


@pytest.mark.parametrize(
    "state",
    [{"num_without_gradient": 4}, {"num_backwards": 0}, {"num_foreign": 1}],
    ids=["none-at-all", "no-backward", "copies-of-its-own"],
)
def test_optimizers_that_have_their_gradients_from_elsewhere_do_not_count(state):
    assert not views((["a"], ["a"]), (["a"], ["a"]), **state)


def test_a_list_that_was_cut_off_parts_nobody():
    many = ["tower", *(f"p{number}" for number in range(MOST_NAMES - 1))]
    (view,) = views(((), many), ((), many))
    assert not view.parted


# The same step of an optimizer on all ranks


def steps(*fields, world=2):
    """What comes of the states of optimizers, in this order, and what is left at the end."""
    optimizers = SideBySide(RankSet(range(world)))
    found = [optimizers.add(optimizer_state(**each)) for each in fields]
    return [each for each in found if each is not None], list(optimizers.rest())


def test_a_step_is_shown_when_all_ranks_have_reported_it():
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
