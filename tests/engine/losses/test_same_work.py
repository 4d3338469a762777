"""Of ranks that work alike it is known which gradients differ, and which may."""

from dataclasses import replace

import pytest

from distdiag.engine.losses.same_work import same_work_view
from distdiag.engine.losses.sums import KnownModel
from distdiag.views.gradients import GradientSample
from tests.checks.contributions import Mix, events_of
from tests.checks.models import plan

PAIR = (0, 1)
AFTER = ("head.weight", "norm.bias", "norm.weight")
BEFORE = ("first.bias", "first.weight", "layers.0.mlp.norm.weight")
SHARDS = ("layers.0.mlp.up.weight",)


def known(num_steps=3, **mixes):
    """A layer whose ranks hold halves; before it each rank gets a part of the gradient."""
    samples = []
    for step in range(num_steps):
        by_rank = {}
        for rank in PAIR:
            own = Mix({(rank, 0): 1.0}, weight=0.5 + 0.1 * rank * (step > 0))
            shard = replace(own, weight=0.5 + rank)
            made = dict.fromkeys(BEFORE, own) | dict.fromkeys(SHARDS, shard)
            event = events_of(rank, step, made | mixes)
            after = events_of(0, step, dict.fromkeys(AFTER, Mix({(0, 0): 1.0})))
            event = event.__class__(
                **{
                    **{name: getattr(event, name) for name in event.__struct_fields__},
                    "gradients": event.gradients + after.gradients,
                }
            )
            by_rank[rank] = event
        samples.append(GradientSample(step, by_rank, {}, frozenset()))
    names = (*AFTER, *BEFORE, *SHARDS)
    shapes = {name: (4,) if name.endswith("bias") else (4, 4) for name in names}
    plans = {name: plan(name, shape=shapes[name]) for name in names}
    return KnownModel(tuple(samples), plans=dict.fromkeys(PAIR, plans))


def test_matrices_before_the_layer_are_apart_and_those_after_it_are_not():
    view = same_work_view("Net", PAIR, known())
    assert view.apart == ("first.weight",)
    assert set(view.equal) == set(AFTER)


@pytest.mark.parametrize(
    "mix",
    [
        Mix({(0, 0): 0.5, (1, 0): 0.5}),
        Mix({(0, 0): 1.0}, weight=0.0),
    ],
    ids=["summed later", "filled with zeros"],
)
def test_others_are_not_reported(mix):
    assert not same_work_view("Net", PAIR, known(**{"first.weight": mix})).apart


def test_one_step_or_no_part_of_a_rank_tells_nothing():
    assert same_work_view("Net", PAIR, known(num_steps=1)) is None
    assert same_work_view("Net", PAIR, known(**dict.fromkeys(SHARDS, Mix({(0, 0): 1.0})))) is None
