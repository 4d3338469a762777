"""How much memory a run takes, whether it grows, and when it would be full."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from distdiag.events.ranks import RankSet
from distdiag.metrics.judging.noise import noise_of
from distdiag.metrics.judging.observation import Point
from distdiag.metrics.judging.telling import point
from distdiag.metrics.runs import Track

WARMUP: Final = 0.2
"""Caches, optimizer states and compiled graphs fill up in the first steps."""
BLOCKS: Final = 20
SIGMAS: Final = 5.0
LARGE: Final = 0.02
"""Growth by less than 2 % of the level over the rest of the log is that of an allocator's cache."""
MOSTLY_UP: Final = 0.75
"""A leak grows in nearly all blocks; a cache grows in one or two."""
FEWEST: Final = 2 * BLOCKS


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a rank, in the unit of the log.

    `growth` is what it gains per step once it has warmed up; 0 where it does not grow by more than
    its noise. `full_at` is the step at which it would reach `limit` at this pace, None if never, or
    if no limit is known.
    """

    run: str
    series: str
    ranks: RankSet
    attempt: int
    peak: float
    peak_at: Point
    last: float
    growth: float
    limit: float | None
    full_at: float | None


def memory_use(track: Track, limit: float | None = None) -> MemoryUse | None:
    """Return the memory use of a track; None if it holds no finite value."""
    if not len(track):
        return None
    peak = int(np.argmax(track.values))
    growth = _growth(track)
    last = float(np.median(track.values[-5:]))
    full_at = None
    if limit is not None and growth > 0:
        full_at = float(track.steps[-1]) + max(limit - last, 0.0) / growth
    return MemoryUse(
        run=track.run,
        series=track.series.name,
        ranks=track.ranks,
        attempt=track.curves.attempt,
        peak=float(track.values[peak]),
        peak_at=point(track, peak),
        last=last,
        growth=growth,
        limit=limit,
        full_at=full_at,
    )


def _growth(track: Track) -> float:
    """Return the slope after the warm-up, by medians of blocks; 0 within the noise."""
    begin = int(WARMUP * len(track))
    values, steps = track.values[begin:], track.steps[begin:]
    if len(values) < FEWEST or steps[-1] <= steps[0]:
        return 0.0
    level = np.array([np.median(block) for block in np.array_split(values, BLOCKS)])
    where = np.array([np.median(block) for block in np.array_split(steps, BLOCKS)])
    gained = float(level[-1] - level[0])
    error = noise_of(values) / np.sqrt(len(values) / BLOCKS)
    is_steady = float((np.diff(level) > 0).mean()) >= MOSTLY_UP
    if gained < max(SIGMAS * error, LARGE * abs(float(level[0]))) or not is_steady:
        return 0.0
    left, right = np.triu_indices(BLOCKS, k=BLOCKS // 4)
    return float(np.median((level[right] - level[left]) / (where[right] - where[left])))
