"""From which step on two runs part, by more than their own noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from distdiag.metrics.cutting import settled
from distdiag.metrics.judging.noise import mad_sigma, noise_of, running_median
from distdiag.metrics.judging.observation import Point, spell_step, spell_value
from distdiag.metrics.judging.telling import point
from distdiag.metrics.judging.trends import departure
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Floats
from distdiag.metrics.summary import MAIN

HALF: Final = 5
"""The difference of two runs is judged by medians of 11 values, whose error is 0.38 sigma."""
SIGMAS: Final = 3.0
"""Three sigma of the difference are eight errors of such a median; noise that lasts for some values
makes the errors twice as large."""
FEWEST: Final = 5
"""Fewer values at the end of a log are no lasting difference."""
SHARE: Final = 0.02
FIRST_EQUAL: Final = 3
"""Runs that log three values alike to the last digit have the same seed, weights and data."""


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """How one series of two runs compares over the steps that both have.

    `num_equal` values are equal to the last digit before the first that is not.
    `first_difference` is the first step with different values, None if there is none. `parts_at`
    is the step from which on the runs stay apart by more than their noise, None if they do not.
    `size` is the difference at the end (second less first), `noise` the standard deviation of the
    difference of two values.
    """

    series: str
    role: str
    num_steps: int
    num_equal: int
    first_difference: float | None
    parts_at: float | None
    size: float
    noise: float
    message: str
    evidence: tuple[Point, ...] = ()


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs compared; the most telling series first. What could not be compared is said."""

    first: str
    second: str
    partings: tuple[Parting, ...]
    not_compared: tuple[str, ...] = ()


def compare(first: Run, second: Run) -> Comparison:
    """Compare two runs by the series that both have, step by step.

    Of each run the lowest rank is taken that both have, else the lowest of each; of its attempts, a
    later one replaces what it repeats.
    """
    ranks = _ranks(first, second)
    one, other = settled(first, ranks[0]), settled(second, ranks[1])
    assert one is not None and other is not None
    found: list[Parting] = []
    left_out: list[str] = []
    names = {(n, n, _role(one.roles, n)) for n in one.series.keys() & other.series.keys()}
    shared = {name for name, _, _ in names}
    for role in one.roles.keys() & other.roles.keys():
        # The same quantity under two names: runs of two trainers.
        if not {one.roles[role], other.roles[role]} & shared:
            names.add((one.roles[role], other.roles[role], role))
    for name, other_name, role in names:
        a = Track(first.name, one, one.series[name], role)
        b = Track(second.name, other, other.series[other_name], role)
        if (parting := _compare(a, b)) is not None:
            found.append(parting)
        else:
            left_out.append(f"{name}: fewer than {FEWEST} steps are in both")
    alone = sorted((one.series.keys() ^ other.series.keys()) - {n for pair in names for n in pair})
    left_out += [f"{name}: only one run has it" for name in alone]
    return Comparison(
        first=first.name,
        second=second.name,
        partings=tuple(sorted(found, key=_telling)),
        not_compared=tuple(sorted(left_out)),
    )


def _ranks(first: Run, second: Run) -> tuple[int | None, int | None]:
    one, other = first.by_rank(), second.by_rank()

    def order(rank: int | None) -> int:
        return -1 if rank is None else rank

    both = sorted(one.keys() & other.keys(), key=order)
    return (both[0], both[0]) if both else (min(one, key=order), min(other, key=order))


def _role(roles: Mapping[str, str], name: str) -> str:
    return next((role for role, played in roles.items() if played == name), "")


def _telling(parting: Parting) -> tuple[bool, float, int, float]:
    """Order by what parts first; among equals by the role, then by the size in noise.

    Of runs that begin alike to the last digit the first difference tells, of others what lasts.
    """
    step = parting.first_difference if parting.num_equal >= FIRST_EQUAL else parting.parts_at
    place = MAIN.index(parting.role) if parting.role in MAIN else len(MAIN)
    size = abs(parting.size) / parting.noise if parting.noise > 0 else abs(parting.size)
    return step is None, step if step is not None else np.inf, place, -size


def _compare(one: Track, other: Track) -> Parting | None:
    steps, here, there = np.intersect1d(one.steps, other.steps, return_indices=True)
    if len(steps) < FEWEST:
        return None
    a, b = one.values[here], other.values[there]
    unequal = np.flatnonzero(a != b)
    difference = b - a
    noise = _noise(a, b)
    start = None if not unequal.size else _lasting(difference, noise, int(unequal[0]))
    size = float(np.median(difference[-FEWEST:]))
    at = start if start is not None else (int(unequal[0]) if unequal.size else len(steps) - 1)
    return Parting(
        series=one.series.name,
        role=one.role,
        num_steps=len(steps),
        num_equal=int(unequal[0]) if unequal.size else len(steps),
        first_difference=float(steps[unequal[0]]) if unequal.size else None,
        parts_at=None if start is None else float(steps[start]),
        size=size,
        noise=noise,
        message="".join(_texts((one, other), steps, unequal, start, (size, noise))),
        evidence=(point(one, int(here[at])), point(other, int(there[at]))),
    )


def _noise(a: Floats, b: Floats) -> float:
    """Return the noise of the difference of two values, from each series' own noise."""
    sigmas = [max(mad_sigma(each - running_median(each)), noise_of(each)) for each in (a, b)]
    return math.hypot(*sigmas)


def _lasting(difference: Floats, noise: float, first: int) -> int | None:
    """Return where the difference leaves the noise to the end; not before the first inequality."""
    level = np.abs(running_median(difference, HALF))
    size = len(level)
    inside = np.flatnonzero(level <= max(SIGMAS * noise, 0.0))
    crossing = int(inside[-1]) + 1 if inside.size else 0
    if size - crossing < max(FEWEST, SHARE * size):
        return None
    if crossing == 0:
        return first
    crossing = min(crossing + HALF, size - 1)
    return max(departure(np.sign(difference[-1]) * difference, crossing), first)


def _texts(
    tracks: tuple[Track, Track],
    steps: Floats,
    unequal: npt.NDArray[np.intp],
    start: int | None,
    sizes: tuple[float, float],
) -> Iterator[str]:
    name = tracks[0].series.name
    if not unequal.size:
        yield f"{name} is equal to the last digit in all {len(steps)} steps that both runs have"
        return
    first = spell_step(float(steps[unequal[0]]))
    size, noise = sizes
    if unequal[0] >= FIRST_EQUAL:
        before = spell_step(float(steps[unequal[0] - 1]))
        yield f"{name} is equal to the last digit up to step {before} and differs first at step "
        yield first
    else:
        yield f"{name} differs from step {first} on"
    if start is None:
        yield f", but never for long by more than the noise ({spell_value(noise)})"
        return
    step = spell_step(float(steps[start]))
    yield f"; the runs part for good at step {step}: " if step != first else ", for good: "
    yield f"the second ends {spell_value(abs(size))} {'above' if size > 0 else 'below'} the first "
    yield f"(noise of the difference: {spell_value(noise)})"
