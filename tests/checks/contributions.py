"""Builds what ranks give and apply, and the views of it, from the coefficients of a program."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.events.ranks import RankSet
from distdiag.views.contributions import (
    ContributionView,
    contributions_of,
    copies_in,
    is_frozen,
    is_left_over,
)
from tests.checks.gradients import ROUNDING
from tests.checks.streams import event_of, plain_site

NUM_SUMS = 4


@dataclass(frozen=True)
class Mix:
    """What becomes of one parameter: coefficients by rank and pass, and what was there before.

    `earlier` are the coefficients of what was given for the step before.
    """

    coefficients: Mapping[tuple[int, int], float]
    left: tuple[float, ...] = ()
    kept: float = 1.0
    weight: float = 0.5
    members: tuple[int, ...] = ()
    earlier: Mapping[tuple[int, int], float] = field(default_factory=dict)


@cache
def given(name, rank, step, number):
    """Return the sums over what a pass of a rank gave: no two are alike."""
    seed = hashlib.sha256(f"{name} {rank} {step} {number}".encode()).digest()
    numbers = random.Random(seed)
    return tuple(numbers.uniform(-1, 1) for _ in range(NUM_SUMS))


def gradient(name, rank, step, mix, num_passes=1):
    """Return one parameter of a rank; the first member of a shard's ranks holds all of it."""
    applied = [0.0] * NUM_SUMS
    if not mix.members or rank == mix.members[0]:
        for when, coefficients in ((step, mix.coefficients), (step - 1, mix.earlier)):
            for (other, number), value in coefficients.items():
                sums = given(name, other, when, number)
                applied = [a + value * s for a, s in zip(applied, sums, strict=True)]
        if mix.left:
            applied = [a + mix.kept * v for a, v in zip(applied, mix.left, strict=True)]
    return GradientSum(
        name=name,
        num_elements=64,
        members=mix.members,
        num_copies=int(bool(mix.members)),
        weight=mix.weight,
        passes=tuple(given(name, rank, step, number) for number in range(num_passes)),
        norms=(1.2,) * num_passes,
        left=mix.left,
        applied=tuple(applied),
        rounding=ROUNDING,
    )


def events_of(rank, step, mixes, num_passes=1, **values):
    """Return what a rank tells of one step."""
    gradients = tuple(gradient(n, rank, step, mix, num_passes) for n, mix in mixes.items())
    values = {"model": "Net", "nodes": (), "site": plain_site(12), **values}
    return event_of(
        GradientSums, rank, step=step, gradients=gradients, num_passes=num_passes, **values
    )


def view(mixes_of, num_ranks=2, num_steps=3, num_passes=1, **values):
    """Return the view of a program: `mixes_of` returns what a rank does in a step, by name.

    It gets what the parameters of the step before had applied, by name.
    """
    found, stale, frozen, first, before = [], set(), set(), {}, {}
    for step in range(num_steps):
        old = {r: {g.name: g.applied for g in e.gradients} for r, e in before.items()}
        by_rank = {
            rank: events_of(rank, step, mixes_of(rank, old.get(rank, {})), num_passes, **values)
            for rank in range(num_ranks)
        }
        if before and is_left_over(before, by_rank):
            stale.add(step)
        if first and is_frozen(first, by_rank):
            frozen.add(step)
        first = first or by_rank
        found += contributions_of(step, by_rank, before)
        before = by_rank
    ranks = RankSet(range(num_ranks))
    return ContributionView(
        "Net",
        ranks,
        tuple(found),
        first,
        copies_in(first),
        {},
        frozenset(stale),
        frozenset(frozen),
    )
