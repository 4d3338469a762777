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
from distdiag.parity.recorded_run import Recorded

MARGIN: Final = 8.0
DROWNED: Final = 0.3
"""A quantity that rounding changes by such a share of itself is not compared."""

_BLOCK: Final = 65_536


class Distance(NamedTuple):
    """How far a tensor is from a reference: the size of the difference, and the best factor."""

    size: float
    factor: float


def distances(reference: Recorded, others: Sequence[Recorded]) -> tuple[float, list[Distance]]:
    """Return the size of `reference`, and how far each of `others` is from it.

    All have the same shape. They are read once, in blocks that stay in the processor's cache.
    """
    flat, rest = reference.reshape(-1), [each.reshape(-1) for each in others]
    square, sums = 0.0, [(0.0, 0.0)] * len(rest)
    for place in range(0, flat.size, _BLOCK):
        part = flat[place : place + _BLOCK].astype(np.float64)
        square += float(part @ part)
        for number, each in enumerate(rest):
            moved = each[place : place + _BLOCK] - part
            apart, along = sums[number]
            sums[number] = (apart + float(moved @ moved), along + float(moved @ part))
    return math.sqrt(square), [
        Distance(math.sqrt(apart), 1 + along / square if square else 1.0) for apart, along in sums
    ]


def compare(
    name: str, reference: Recorded, candidate: Recorded, repeats: Sequence[Recorded], unit: float
) -> Difference | None:
    """Compare one quantity with what the repeats of the reference allow.

    None if rounding alone changes it so much that nothing can be said. `unit` is the relative
    distance between two neighbouring numbers of its dtype. Repeats that are the reference to the
    last bit may be left out.
    """
    size, (measured, *found) = distances(reference, [candidate, *repeats])
    if not math.isfinite(measured.size):
        both = not np.isfinite(reference).all()
        return None if both else _infinite(name)
    noise = max((each.size for each in found), default=0.0)
    if size == 0.0:
        ratio = measured.size / (MARGIN * noise) if noise else math.inf if measured.size else 0.0
        return Difference(name=name, measured=measured.size, bound=MARGIN * noise, ratio=ratio)
    noise /= size
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
