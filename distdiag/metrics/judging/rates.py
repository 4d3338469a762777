"""Learning rates that jump as no schedule does, or are zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.plateaus import longest_row
from distdiag.metrics.judging.telling import FEWEST, at_most_note, observe, point
from distdiag.metrics.runs import Run, Track

JUMP: Final = 3.0
"""Stairs of a warm-up by epochs at most double the rate after the first; decays only lower it."""
ABOVE_EARLIER: Final = 1.5
"""Warm restarts go back to the peak of before, or to less."""
EARLY: Final = 0.3
"""A constant warm-up ends with a jump; it takes less than this share of a run."""
ZERO_SHARE: Final = 0.2
FALL_TO_ZERO: Final = 0.1
"""Schedules that end at zero pass a tenth of their peak on the way."""
LOOK: Final = (
    "Look at the scheduler: is it stepped once in each optimizer step, is its number of steps that "
    "of this run, was its state loaded with the checkpoint?"
)


def look(run: Run) -> Iterator[Observation]:
    """Tell of jumps of the learning rate and of rates of zero."""
    for track in run.tracks("lr"):
        if len(track) > 2:
            yield from _jump(track)
            yield from _zero(track)


def _jump(track: Track) -> Iterator[Observation]:
    rates = track.values
    earlier = np.maximum.accumulate(rates)[:-1]
    ups = (rates[1:] > JUMP * rates[:-1]) & (rates[1:] > ABOVE_EARLIER * earlier)
    ups &= rates[:-1] > 0
    # A warm-up that is logged every some steps multiplies the rate, too, but from its start on.
    ups &= np.arange(len(ups)) >= max(EARLY * len(rates), 2)
    for index in np.flatnonzero(ups)[:1] + 1:
        step = float(track.steps[index])
        text = (
            f"{track.series.name} jumps from {spell_value(float(rates[index - 1]))} to "
            f"{spell_value(float(rates[index]))} at step {spell_step(step)}, "
            f"{rates[index] / rates[index - 1]:.3g} times; it was never above "
            f"{spell_value(float(earlier[index - 1]))} before. No warm-up, decay or restart does so"
        )
        points = (point(track, index - 1), point(track, index))
        severity = at_most_note(track, Severity.WARNING)
        yield observe(track, Kind.RATE_JUMP, severity, (text, LOOK), points, (step, None))


def _zero(track: Track) -> Iterator[Observation]:
    rates = track.values
    if not (rates == 0).any():
        return
    begin, end = longest_row(np.where(rates == 0, 0.0, np.arange(len(rates)) + 1.0))
    if rates[begin] != 0 or end - begin < max(ZERO_SHARE * len(rates), FEWEST):
        return
    fell = begin == 0 or rates[begin - 1] > FALL_TO_ZERO * rates[:begin].max()
    first, last = float(track.steps[begin]), float(track.steps[end - 1])
    whole = end - begin == len(rates)
    text = (
        f"{track.series.name} is 0 from step {spell_step(first)} to step {spell_step(last)}"
        f"{', the whole log' if whole else ''}: nothing is learned there"
    )
    if begin and fell:
        text += f". It was {spell_value(float(rates[begin - 1]))} before, and did not decay to 0"
    points = (point(track, begin), point(track, end - 1))
    until = None if end == len(rates) else float(track.steps[end])
    severity = Severity.WARNING if fell else Severity.INFO
    yield observe(track, Kind.RATE_ZERO, severity, (text, LOOK), points, (first, until))
