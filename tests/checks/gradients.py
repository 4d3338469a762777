"""Builds what the engine would show of gradients: two ranks, each with an expert of its own."""

import math

from distdiag.events.gradients import AutogradNode, Flow, GradientSum, GradientSums
from distdiag.events.ranks import RankSet
from distdiag.views.gradients import GradientSample, GradientView
from tests.checks.streams import event_of, plain_site

DENSE = ("embed.weight", "gate.weight", "head.weight", "norm.weight")
EXPERTS = ("experts.0.weight", "experts.1.weight", "experts.2.weight", "experts.3.weight")
ROUNDING = 2.0**-24
"""Of float32."""

NOTHING = Flow(0, math.nan, math.nan)


def given(name, rank, step):
    """Return what a rank's passes gave for a parameter: no two are alike."""
    return math.sin(1.0 + hash_of(name) + 7.3 * rank + 3.1 * step) + 1.5


def hash_of(name):
    return sum(place * ord(letter) for place, letter in enumerate(name, 1)) % 97


def gradient(name, rank, step, members, divisor, weight=None):
    """Return a gradient that is the sum over these ranks, divided."""
    applied = sum(given(name, each, step) for each in members) / divisor
    weight = float(rank) if weight is None else weight
    return GradientSum(
        name=name,
        num_elements=64,
        members=(),
        num_copies=0,
        weight=weight,
        passes=((given(name, rank, step),),),
        norms=(3.0,),
        left=(),
        applied=(applied,),
        rounding=ROUNDING,
    )


def nodes(factor=1.0, scale=None):
    """The loss, the exchange after the experts, and the one before them."""
    back = Flow(64, 1.0, 2.0)
    there = Flow(64, factor, 2.0 * factor)
    found = [
        AutogradNode("", (0, 0), NOTHING, NOTHING, DENSE, (1,), True),
        AutogradNode("ExchangeBackward", (11, 12), back, there, EXPERTS, (2,), True),
        AutogradNode("ExchangeBackward", (12, 13), back, back, DENSE[:1], (), True),
    ]
    exchanges = [(), (0, 1), (0, 1)]
    if scale is not None:
        scaled = Flow(64, scale, 2.0 * scale)
        found.append(AutogradNode("ScaleBackward", (0, 0), back, scaled, (), (), True))
        exchanges.append(())
    return tuple(found), tuple(exchanges)


def sample(step, dense, experts, of_rank=lambda rank: (rank,), **values):
    """A step: dense gradients are divided by one number, those of experts by another."""
    weight = values.pop("weight", None)
    found, exchanges = nodes(**values)
    by_rank = {
        rank: event_of(
            GradientSums,
            rank,
            step=step,
            model="Net",
            gradients=(
                *(gradient(name, rank, step, (0, 1), dense, 0.5) for name in DENSE),
                *(gradient(n, rank, step, of_rank(rank), experts, weight) for n in EXPERTS),
            ),
            nodes=found,
            site=plain_site(10),
        )
        for rank in (0, 1)
    }
    return GradientSample(step, by_rank, dict.fromkeys((0, 1), exchanges), frozenset({(0, 1)}))


def view(*samples):
    return GradientView("Net", RankSet([0, 1]), samples)
