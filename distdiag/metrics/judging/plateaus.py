"""Losses that stand still: to the last digit, or within their noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.divergence import has_trend
from distdiag.metrics.judging.noise import mad_sigma, noise_of, quantum
from distdiag.metrics.judging.observation import (
    Kind,
    Observation,
    spell_step,
    spell_value,
)
from distdiag.metrics.judging.telling import FEWEST, observe, point
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Floats

DIGITS_OF_NOISE: Final = 5.0
"""Noise of five units in the last digit repeats a value by chance once in about 12; twenty times in
a row never."""
SHARE: Final = 0.5
"""A loss that is flat over more than half of a run is worth a word."""
SIGMAS: Final = 4.0
"""Flat means: the halves of the stretch differ by less than this many standard errors."""
LOOK_STUCK: Final = (
    "Look whether the optimizer steps: requires_grad of the parameters, a detach() in the loss, a "
    "learning rate of 0, a loss scale that skips every step, parameters that the optimizer lacks."
)
LOOK_FLAT: Final = (
    "If training should go on: look at the learning rate at this step, and whether the gradient "
    "norm has fallen, too. If it has converged, further steps cost time alone."
)


def look(run: Run) -> Iterator[Observation]:
    """Tell of losses that repeat one value, and of those that are flat for most of the run."""
    for track in run.tracks("loss"):
        if len(track) < 2 or not has_trend(track):
            continue
        stuck = _stuck(track)
        yield from stuck
        if not stuck:
            yield from _flat(track)


def longest_row(values: Floats) -> tuple[int, int]:
    """Return begin and end of the longest row of equal values."""
    edges = np.flatnonzero(np.concatenate([[True], np.diff(values) != 0, [True]]))
    longest = int(np.argmax(np.diff(edges)))
    return int(edges[longest]), int(edges[longest + 1])


def _stuck(track: Track) -> list[Observation]:
    begin, end = longest_row(track.values)
    if end - begin < FEWEST or not _is_strange(track, begin, end):
        return []
    value, step = float(track.values[begin]), float(track.steps[begin])
    whole = end - begin == len(track)
    text = (
        f"{track.series.name} is {value:.10g} to the last digit in {end - begin} values in a row, "
        f"from step {spell_step(step)} to step {spell_step(float(track.steps[end - 1]))}"
    )
    text += ", the whole log" if whole else ""
    texts = (text, LOOK_STUCK)
    points = (point(track, begin), point(track, end - 1))
    until = None if end == len(track) else float(track.steps[end])
    return [observe(track, Kind.STUCK, Severity.WARNING, texts, points, (step, until))]


def _is_strange(track: Track, begin: int, end: int) -> bool:
    """Tell whether rounding does not explain that values repeat: the noise was many digits."""
    if begin == 0 and end == len(track):
        return True
    values = track.values
    others = np.concatenate([values[max(begin - 50, 0) : begin], values[end : end + 50]])
    if len(others) < FEWEST:
        return False
    sigma = mad_sigma(np.diff(others)) / math.sqrt(2.0)
    return sigma > DIGITS_OF_NOISE * quantum(values)


def _flat(track: Track) -> Iterator[Observation]:
    """Tell of the stretch up to the end in which the loss does not fall."""
    if len(track) < 2 * FEWEST:
        return
    size = len(track)
    for begin in (0, size // 10, size // 4, int(size * (1 - SHARE))):
        part = track.values[begin:]
        if _is_flat(part):
            break
    else:
        return
    level, step = float(np.median(part)), float(track.steps[begin])
    share = f"the last {len(part) / size:.0%} of the log" if begin else "the whole log"
    text = (
        f"{track.series.name} is flat from step {spell_step(step)} on, {share}: it stays at "
        f"{spell_value(level)} within its noise of {spell_value(noise_of(part))}"
    )
    points = (point(track, begin), point(track, size - 1))
    texts = (text, LOOK_FLAT)
    yield observe(track, Kind.PLATEAU, Severity.INFO, texts, points, (step, None))


def _is_flat(values: Floats) -> bool:
    thirds = np.array_split(values, 3)
    sigma = max(mad_sigma(values - np.median(values)), noise_of(values))
    # The standard error of a median is 1.25 sigma / sqrt(n); of a difference of two, sqrt(2) more.
    allowed = SIGMAS * 1.25 * sigma * math.sqrt(2.0 / len(thirds[0]))
    middles = [float(np.median(third)) for third in thirds]
    return max(middles) - min(middles) <= min(allowed, sigma)
