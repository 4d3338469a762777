"""By how much two runs may differ: derived from runs that are right, not chosen.

The reference runs once more as it is (what is not deterministic shows), and once more with all
parameters and floating-point inputs changed by one unit of rounding (what rounding is amplified to
shows). Another way to split the same sums does no worse than `MARGIN` times that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from distdiag.disparity import Difference
from distdiag.parity.recorded_run import Array

MARGIN: Final = 8.0
DROWNED: Final = 0.3
"""A quantity that rounding changes by such a share of itself is not compared."""


class Distance(NamedTuple):
    """How far a tensor is from a reference: the size of the difference, and the best factor."""

    size: float
    factor: float


def distance(reference: Array, other: Array) -> Distance:
    """Return how far `other` is from `reference` (any shape, the same for both)."""
    square = float(np.vdot(reference, reference))
    factor = float(np.vdot(reference, other)) / square if square else 1.0
    return Distance(float(np.linalg.norm(other - reference)), factor)


def compare(
    name: str, reference: Array, candidate: Array, repeats: Sequence[Array], unit: float
) -> Difference | None:
    """Compare one quantity with what the repeats of the reference allow.

    None if rounding alone changes it so much that nothing can be said. `unit` is the relative
    distance between two neighbouring numbers of its dtype.
    """
    size = float(np.linalg.norm(reference))
    measured = distance(reference, candidate)
    if not math.isfinite(measured.size):
        both = not np.isfinite(reference).all()
        return None if both else _infinite(name)
    if size == 0.0:
        noise = max((float(np.linalg.norm(repeat)) for repeat in repeats), default=0.0)
        ratio = measured.size / (MARGIN * noise) if noise else math.inf if measured.size else 0.0
        return Difference(name=name, measured=measured.size, bound=MARGIN * noise, ratio=ratio)
    found = [distance(reference, repeat) for repeat in repeats]
    noise = max((each.size for each in found), default=0.0) / size
    if noise > DROWNED:
        return None
    bound = MARGIN * max(noise, unit)
    # A common factor is known better than each element: rounding averages out over them.
    spread = max((abs(each.factor - 1) for each in found), default=0.0)
    factor_bound = MARGIN * max(spread, noise / math.sqrt(reference.size)) + 2 * unit
    relative = measured.size / size
    ratio = max(relative / bound, abs(measured.factor - 1) / factor_bound)
    if abs(measured.factor - 1) / factor_bound > relative / bound:
        bound = factor_bound
    return Difference(
        name=name, measured=relative, bound=bound, ratio=ratio, factor=measured.factor
    )


def _infinite(name: str) -> Difference:
    return Difference(name=name, measured=math.inf, bound=0.0, ratio=math.inf, factor=math.nan)
