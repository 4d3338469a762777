"""Spikes: values far above their neighbours that the tail of the others does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.noise import (
    expected_beyond,
    local_sigma,
    mad_sigma,
    noise_of,
    outliers,
    quantum,
    running_median,
)
from distdiag.metrics.judging.observation import (
    Kind,
    Observation,
    Point,
    spell_step,
    spell_value,
)
from distdiag.metrics.judging.telling import at_most_note, observe, point
from distdiag.metrics.runs import Run, Track, beside
from distdiag.metrics.series import Floats

FEWEST: Final = 30
"""A tail needs ten values below the spikes, and the level 25 around them."""
SIGMAS: Final = 8.0
"""Normal noise reaches this once in 10 ** 15 values."""
CHANCE: Final = 1e-3
SURE_CHANCE: Final = 1e-9
"""With ten series in a run, chance gives a note to one in 100 runs. A warning asks for more, for
the shape of a tail is known badly: healthy curves at random (tests/metrics/judging) have none."""
MOST: Final = 50
MOST_SHARE: Final = 0.02
"""What happens at more than one value in 50 is how the series is."""
SMALLEST: Final = 1e-9
"""Noise of a series that has none (float32 rounds at 6e-8)."""
LOSS_TAIL: Final = 0.5
NORM_TAIL: Final = 0.0
"""Tails are at most so long: for losses that of a variance which just exists; the logarithm of a
gradient norm has an exponential tail where the norm itself follows a power law."""
WARMUP: Final = 10
"""The first values of a run fall steeply: no level is known there."""
LARGE: Final = {"loss": 1.4, "val_loss": 1.4, "grad_norm": 10.0}
"""So many times its level makes a spike a warning. Gradient norms of runs that train well reach
some times their median; a loss that rises by 40 % undoes many steps."""
MANY: Final = 10
"""Two values in a row that stand out are chance where more than ten others do."""
ALONE: Final = 5.0
"""A single value of a loss is more than one odd batch from five times its level on: public logs of
192 trainings hold some dozens of such values, up to 1.8 times their level, that changed nothing."""
WORTH_A_NOTE: Final = {"loss": 1.1, "val_loss": 1.1, "grad_norm": 3.0}
"""What is smaller than so many times its level changes nothing in a run, however rare it is."""
SHOWN: Final = 5
LOOK: Final = (
    "Look at the batch of this step (its length, its labels, repeated text), at the gradient norm "
    "and the learning rate. A clipped gradient norm and a skipped batch bound the damage."
)

Groups = list[tuple[int, int, int]]
"""Begin, peak and end (indices) of values that stand out together."""


@dataclass(frozen=True)
class Spike:
    """Values from `begin` to before `end` stand above their level, most at `peak` (indices)."""

    begin: int
    peak: int
    end: int
    sigmas: float
    level: float
    chance: float

    def times(self, track: Track) -> float:
        """Return the peak in times of the level; infinite where the level is not positive."""
        return float(track.values[self.peak]) / self.level if self.level > 0 else np.inf


def look(run: Run) -> Iterator[Observation]:
    """Tell of the spikes of losses and gradient norms."""
    for track in run.tracks("loss", "val_loss", "grad_norm"):
        least = WORTH_A_NOTE[track.role]
        yield from _observations(track, [s for s in spikes_of(track) if s.times(track) > least])


def spikes_of(track: Track) -> list[Spike]:
    """Return the spikes of a track, with the tail that its role may have."""
    return find_spikes(track.values, NORM_TAIL if track.role == "grad_norm" else LOSS_TAIL)


def find_spikes(values: Floats, longest: float = LOSS_TAIL) -> list[Spike]:
    """Return the spikes of a series, in their order.

    Values that are not negative are compared by their logarithms, for noise goes with the level.
    """
    if len(values) < FEWEST:
        return []
    is_positive = bool((values >= 0).all() and np.median(values) > 0)
    # A norm of exactly 0 among others is no smaller than the least of them.
    scaled = np.log(np.maximum(values, values[values > 0].min())) if is_positive else values
    level = running_median(scaled)
    deviations = scaled - level
    # A series that falls steadily is its own median: its noise is that of its differences.
    whole = max(mad_sigma(deviations), noise_of(scaled), SMALLEST)
    sigma = local_sigma(deviations, whole)
    if is_positive:
        # Rounding moves small values by more of themselves.
        sigma = np.maximum(sigma, quantum(values) / np.sqrt(12.0) / np.exp(level))
    sizes = deviations / sigma
    sizes[:WARMUP] = 0.0
    groups = _groups(sizes)
    number, tail = _groups_beyond(sizes, groups, longest)
    ordered = sorted(groups, key=lambda group: -sizes[group[1]])[:number]
    real = np.exp(level) if is_positive else level
    found = []
    for begin, peak, end in sorted(ordered):
        size = float(sizes[peak])
        chance = expected_beyond(tail[:-1] - tail[-1], size - float(tail[-1]), longest)
        found.append(Spike(begin, peak, end, size, float(real[peak]), chance))
    return found


def _groups_beyond(sizes: Floats, groups: Groups, longest: float) -> tuple[int, Floats]:
    """Return how many groups are no part of the tail, and the tail; a group counts by its peak."""
    if not groups:
        return 0, sizes
    alone = sizes.copy()
    for begin, peak, end in groups:
        alone[begin:end] = 0.0
        alone[peak] = sizes[peak]
    most = min(MOST, max(int(MOST_SHARE * len(sizes)), 1), len(groups))
    number, chance, tail = outliers(alone, most, longest)
    return (number if chance < math.log(CHANCE) else 0), tail


def _groups(sizes: Floats) -> Groups:
    """Return begin, peak and end of what stands above `SIGMAS`, with its slopes down to half."""
    found: Groups = []
    high = sizes > SIGMAS / 2.0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], high, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        peak = begin + int(np.argmax(sizes[begin:end]))
        if sizes[peak] > SIGMAS:
            found.append((begin, peak, end))
    return found


def _observations(track: Track, spikes: list[Spike]) -> Iterator[Observation]:
    """Tell of the largest spikes; of many that are notes, of the largest alone."""
    largest = sorted(spikes, key=lambda spike: -spike.sigmas)[:SHOWN]
    told = [_observation(track, spike, len(spikes)) for spike in largest]
    is_many = len(spikes) > SHOWN
    yield from (
        each
        for place, each in enumerate(told)
        if place == 0 or not is_many or each.severity is not Severity.INFO
    )


def _observation(track: Track, spike: Spike, number: int) -> Observation:
    name, values, steps = track.series.name, track.values, track.steps
    at = spell_step(float(steps[spike.peak]))
    size = f"from a level of {spell_value(spike.level)}, {spike.sigmas:.0f} standard deviations"
    text = f"{name} jumps to {spell_value(float(values[spike.peak]))} at step {at} ({size})"
    if spike.begin < spike.peak:
        text += f"; it begins to rise at step {spell_step(float(steps[spike.begin]))}"
    back = float(steps[spike.end]) if spike.end < len(track) else None
    count = spike.end - spike.peak
    text += f". It is back at step {spell_step(back)}, " if back is not None else ""
    text += f"{count} value{'s' if count > 1 else ''} later" if back is not None else ""
    text += ". The log ends before it is back" if back is None else ""
    text += f". There are {number} such spikes" if number > 1 else ""
    points = [point(track, spike.peak), *_norm_before(track, spike)]
    if len(points) > 1:
        text += f". The gradient norm was {points[1].value} at step {spell_step(points[1].step)}"
    steps_of = (float(steps[spike.peak]), back)
    severity = at_most_note(
        track, _severity(track, spike, is_felt=len(points) > 1, is_usual=number > MANY)
    )
    return observe(track, Kind.SPIKE, severity, (text, LOOK), tuple(points), steps_of)


def _severity(track: Track, spike: Spike, *, is_felt: bool, is_usual: bool) -> Severity:
    """Judge a spike: one value of a loss, and no gradient to it, is one odd batch."""
    if track.role != "grad_norm" and beside(track, "reward") is not None:
        return Severity.INFO  # such losses have no level: their sign changes
    lasts = (spike.end - spike.peak > 1 and not is_usual) or is_felt or spike.times(track) > ALONE
    if track.role != "grad_norm" and not lasts:
        return Severity.INFO
    is_large = LARGE[track.role] < spike.times(track) < np.inf
    return Severity.WARNING if is_large and spike.chance < SURE_CHANCE else Severity.INFO


def _norm_before(track: Track, spike: Spike) -> Iterator[Point]:
    """Yield the gradient norm that spiked just before, or with, a spike of the loss."""
    norms = beside(track, "grad_norm")
    if track.role == "grad_norm" or norms is None:
        return
    step = float(track.steps[spike.peak])
    reach = float(track.steps[max(spike.begin - 3, 0)])
    for other in spikes_of(norms):
        if reach <= norms.steps[other.peak] <= step:
            yield point(norms, other.peak)
            return
