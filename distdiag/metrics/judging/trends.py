"""Where a series leaves its level for good, found from its own noise and its own earlier rises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from distdiag.metrics.judging.noise import HALF_WINDOW, mad_sigma, noise_of, running_median
from distdiag.metrics.series import Floats

SIGMAS: Final = 5.0
"""A median of five values exceeds this by chance once in 10 ** 17."""
EARLIER_RISES: Final = 3.0
"""A rise counts if it is so many times larger than any before: cycles of a learning rate, epochs
and games of two networks rise again and again by about the same."""
FEWEST_AFTER: Final = 5
"""Fewer values after a change are no new level: the log may end in a spike."""
DEPARTED: Final = 3.0
"""Normal noise is above this once in 700 values, and a break in the row ends the search."""
SEARCH: Final = 20
"""The first value that departs is looked for so many values before the level is surely left."""


@dataclass(frozen=True)
class Rise:
    """A series leaves its level at `begin` (an index) and ends `size` above it.

    `level` is the lowest running level before, `end` the one that the series ends with, `drop` how
    far it had fallen to `level` from its start, `sigma` the noise, `earlier` the largest rise of
    the running level before.
    """

    begin: int
    level: float
    end: float
    drop: float
    sigma: float
    earlier: float

    @property
    def size(self) -> float:
        """How far the end is above the lowest level."""
        return self.end - self.level


def find_rise(values: Floats) -> Rise | None:
    """Return where a series leaves its lowest level and does not come back, None if it does not."""
    size = len(values)
    if size < 2 * FEWEST_AFTER:
        return None
    half = max(2, min(HALF_WINDOW, size // 20))
    level = running_median(values, half)
    last = max(FEWEST_AFTER, size // 20)
    end = float(np.median(values[-last:]))
    lowest = int(np.argmin(level[: size - FEWEST_AFTER]))
    base = float(level[lowest])
    before = values[max(lowest - 5 * half, 0) : lowest + half]
    sigma = max(
        noise_of(before), mad_sigma(before - level[max(lowest - 5 * half, 0) :][: len(before)])
    )
    earlier = _largest_rise(level[: lowest + 1])
    if end - base <= max(SIGMAS * sigma, EARLIER_RISES * earlier):
        return None
    begin = _beginning(values, lowest, base, sigma, end)
    if begin is None:
        return None
    start = float(np.median(values[: max(3, size // 50)]))
    return Rise(begin, base, end, start - base, sigma, earlier)


def _largest_rise(level: Floats) -> float:
    return float((level - np.minimum.accumulate(level)).max(initial=0.0))


def _beginning(values: Floats, lowest: int, base: float, sigma: float, end: float) -> int | None:
    """Return the first value that departs: the last one within the noise, then the best bend."""
    limit = base + max(SIGMAS * sigma, 0.1 * (end - base))
    smooth = running_median(values, 2)
    inside = np.flatnonzero(smooth <= limit)
    last_inside = int(inside[-1]) if inside.size else lowest
    if len(values) - 1 - last_inside < FEWEST_AFTER:
        return None
    return departure(values, last_inside + 1)


def departure(values: Floats, crossing: int) -> int:
    """Return the first value that departs from a line, near a value that surely has.

    The line goes through the values before. What stands above it by `DEPARTED` standard deviations
    without a break up to the crossing has departed. The line is drawn again without those values
    until no more of them are found.
    """
    first = crossing
    while True:
        stop = first - 2
        begin = max(stop - 3 * SEARCH, 0)
        if stop - begin < 2 * FEWEST_AFTER:
            return first
        (intercept, slope), sigma = _line(values[begin:stop])
        line = intercept + slope * np.arange(crossing - begin)
        inside = np.flatnonzero(values[begin:crossing] - line <= DEPARTED * sigma)
        found = begin + int(inside[-1]) + 1 if inside.size else begin
        if crossing - found > SEARCH:
            return first
        if found >= first:
            return min(found, crossing)
        first = found


def _line(values: Floats) -> tuple[tuple[float, float], float]:
    """Return intercept and slope of the line through most values, and the noise around it.

    The slope is Theil and Sen's: the median over pairs, which single values do not move.
    """
    x = np.arange(len(values), dtype=np.float64)
    left, right = np.triu_indices(len(values), k=max(len(values) // 4, 1))
    slope = float(np.median((values[right] - values[left]) / (right - left)))
    rest = values - slope * x
    intercept = float(np.median(rest))
    sigma = max(mad_sigma(rest), noise_of(values))
    return (intercept, slope), sigma
