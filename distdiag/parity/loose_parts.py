"""Parameters whose parts no mesh puts together: whether they may be those of the whole.

A layer that splits its weights by hand has a part of another shape on each rank. Where in the whole
a part belongs is not known, but the sum and the sum of squares of all values do not depend on that.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from distdiag.disparity import Difference
from distdiag.parity.recorded_run import Array, RecordedRun
from distdiag.recording import Kind

SAME: Final = 1e-9
"""Sums of the same values in another order differ by no more of themselves."""
DEVIATIONS: Final = 8.0
FEWEST_VALUES: Final = 256
LEAST_CHANGE: Final = 0.05


class Moments(NamedTuple):
    """Sums of the powers of all values of a parameter."""

    size: int
    first: float
    second: float
    fourth: float

    @property
    def spread(self) -> float:
        """How far the mean square of so many values is off by chance, as a share of it."""
        mean = self.second / self.size
        return math.sqrt(max(self.fourth / self.size / mean**2 - 1, 0.0) / self.size)


class Parts(NamedTuple):
    """What comparing the parts with the whole says; a difference is one of their scale."""

    are_same: bool
    difference: Difference | None


def compare_parts(reference: RecordedRun, candidate: RecordedRun, name: str) -> Parts | None:
    """Compare a parameter before the first step; None if the parts are not all of the whole."""
    ours, theirs = _moments(reference, name), _moments(candidate, name)
    if ours is None or theirs is None or ours.size != theirs.size:
        return None
    if not (math.isfinite(ours.fourth) and math.isfinite(theirs.fourth)):
        return None
    largest = math.sqrt(ours.size * ours.second)
    if (
        abs(theirs.first - ours.first) <= SAME * largest
        and abs(theirs.second - ours.second) <= SAME * ours.second
    ):
        return Parts(are_same=True, difference=None)
    if ours.size < FEWEST_VALUES or not ours.second or not theirs.second:
        return Parts(are_same=False, difference=None)
    factor = math.sqrt(theirs.second / ours.second)
    chance = math.hypot(ours.spread, theirs.spread) / 2  # of a root: half of that of its square
    bound = max(DEVIATIONS * chance, LEAST_CHANGE)
    ratio = abs(math.log(factor)) / bound
    found = Difference(name=name, measured=abs(factor - 1), bound=bound, ratio=ratio, factor=factor)
    return Parts(are_same=False, difference=found if ratio > 1 else None)


def _moments(run: RecordedRun, name: str) -> Moments | None:
    distinct: dict[str, Array] = {}
    for rank, record in run.by_rank(Kind.START, 0, 0, name).items():
        if record.num_bytes and record.part == record.shape:
            distinct.setdefault(record.digest, run.array(rank, record))
    if not distinct:
        return None
    values = np.concatenate([part.ravel() for part in distinct.values()])
    squares = values * values
    return Moments(len(values), float(values.sum()), float(squares.sum()), float(squares @ squares))
