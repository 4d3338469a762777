"""Biases and routers that are known by what ranks train together beside them."""

from __future__ import annotations

import pytest

from distdiag.engine.models.models import Models
from distdiag.events.models import Basis, Moment
from distdiag.events.ranks import RankSet
from distdiag.views.models import ReplicaView
from tests.checks.models import content, plan, plan_event, state_event

NONE = {"keeper": "", "basis": Basis.WORLD}
OWN = {"keeper": "", "basis": Basis.OWN}
BIAS = {
    **NONE,
    "shape": (4,),
    "is_parameter": False,
    "requires_grad": False,
    "is_routing_bias": True,
}


def moved(value):
    """A weight that training has changed, and not by a factor alone."""
    return content(value, least=-1.0, greatest=1.0 + value)


def views(plans, *held_by_step, ranks=(0, 1)):
    """What is told by routers, of what rank 0, 1, … hold when they start, and at each step."""
    models = Models()
    events = [plan_event(rank, plans) for rank in ranks]
    for step, held in enumerate(held_by_step):
        fields = {"moment": Moment.STEP if step else Moment.START, "step": step}
        events += [state_event(rank, held[rank], **fields) for rank in ranks]
    found = [view for event in events for view in models.feed(event)]
    told = (Basis.ROUTER, Basis.LAYER)
    return [v for v in found if isinstance(v, ReplicaView) and v.basis in told]


# Biases


def biased(ranks=(0, 1), **values):
    bias = plan("moe.expert_bias", replicas=ranks, **BIAS | values)
    return [plan("moe.gate.weight", replicas=ranks, **NONE), bias]


def test_a_bias_is_compared_where_the_router_stays_the_same_while_it_is_trained():
    held = [[moved(0.1), 0.0]] * 2, [[moved(0.3), 0.1], [moved(0.3), 0.2]]
    (view,) = views(biased(), *held)
    assert [tensor.plan.name for tensor in view.tensors] == ["moe.expert_bias"]
    assert (view.basis, view.ranks, view.alike_at) == (Basis.ROUTER, RankSet([0, 1]), 0)


def test_it_is_told_once():
    later = [[moved(0.3), 0.1], [moved(0.3), 0.2]]
    assert len(views(biased(), [[moved(0.1), 0.0]] * 2, later, later)) == 1


def test_ranks_that_train_one_router_are_compared_apart_from_others():
    start = [[moved(0.1), 0.0]] * 4
    held = [[moved(w), b] for w, b in ((0.3, 0.1), (0.3, 0.1), (0.4, 0.2), (0.4, 0.3))]
    (view,) = views(biased((0, 1, 2, 3)), start, held, ranks=(0, 1, 2, 3))
    assert view.ranks == RankSet([2, 3])


@pytest.mark.parametrize(
    ("start", "after"),
    [
        ([(0.1, 0.0)] * 2, [(0.1, 0.1), (0.1, 0.2)]),
        ([(0.1, 0.0)] * 2, [(0.3, 0.1), (0.4, 0.2)]),
        ([(0.1, 0.0)] * 2, [(0.3, 0.1), (0.3, 0.1)]),
        ([(0.1, 0.5), (0.1, 0.6)], [(0.3, 0.1), (0.3, 0.2)]),
    ],
    ids=["not trained", "each for itself", "equal biases", "never alike"],
)
def test_other_biases_are_not(start, after):
    held = [[[moved(weight), bias] for weight, bias in each] for each in (start, after)]
    assert not views(biased(), *held)


def test_a_router_that_merely_decays_tells_nothing():
    held = (
        [[content(0.5, least=-1.0, greatest=2.0), 0.0]] * 2,
        [[content(0.45, least=-0.9, greatest=1.8), bias] for bias in (0.1, 0.2)],
    )
    assert not views(biased(), *held)


def test_a_bias_whose_ranks_are_known_is_left_to_what_tells_them():
    held = [[moved(0.1), 0.0]] * 2, [[moved(0.3), 0.1], [moved(0.3), 0.2]]
    assert not views(biased(basis=Basis.REDUCED), *held)


# Routers

NAMES = ("0.norm.weight", "0.moe.gate.weight", "0.moe.experts.0.weight", "0.moe.experts.1.weight")


def block(names=NAMES, num_experts=4, **values):
    """Experts of this rank with their marks, and a router that has one, too."""
    kinds = [{"replicas": (0, 1), **NONE}, OWN | values, OWN, OWN]
    shapes = [(8,), (num_experts, 8), (8, 8), (8, 8)]
    return [
        plan(name, shape=shape, **kind)
        for name, shape, kind in zip(names, shapes, kinds, strict=True)
    ]


def held(norm, router, expert=(0.5, 0.6)):
    return [[moved(norm[r]), moved(router[r]), moved(expert[r]), moved(expert[r])] for r in (0, 1)]


START = held((0.1, 0.1), (0.2, 0.2))
DRIFTED = held((0.3, 0.3), (0.4, 0.5))


def test_a_router_that_is_marked_as_a_part_is_compared_where_the_rest_of_its_layer_is_shared():
    (view,) = views(block(), START, DRIFTED)
    assert [tensor.plan.name for tensor in view.tensors] == ["0.moe.gate.weight"]
    assert (view.basis, view.ranks, view.alike_at) == (Basis.LAYER, RankSet([0, 1]), 0)


@pytest.mark.parametrize(
    ("start", "after"),
    [
        (held((0.1, 0.1), (0.2, 0.3)), DRIFTED),
        (START, held((0.3, 0.4), (0.4, 0.5))),
        (START, held((0.1, 0.1), (0.4, 0.5))),
        (START, held((0.3, 0.3), (0.4, 0.4))),
    ],
    ids=["never alike", "each for itself", "the rest is not trained", "not drifted"],
)
def test_routers_that_may_be_parts_are_not(start, after):
    assert not views(block(), start, after)


def test_a_router_of_the_experts_of_one_rank_may_be_a_part_of_it():
    assert not views(block(num_experts=2), START, DRIFTED)


def test_who_trains_other_parts_for_itself_may_mean_the_router_too():
    names = ("0.norm.weight", "0.moe.gate.weight", "0.moe.experts.0.weight", "0.head.weight")
    assert not views(block(names), START, DRIFTED)


def test_experts_in_a_list_of_their_own_are_those_of_the_layer_around_it():
    names = [name.replace("experts.", "experts.local_experts.") for name in NAMES]
    assert len(views(block(names), START, DRIFTED)) == 1


def test_parts_of_a_router_are_not_compared():
    assert not views(block(basis=Basis.WRAPPER), START, DRIFTED)
