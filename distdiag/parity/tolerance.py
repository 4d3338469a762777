"""By how much two runs may differ: derived from runs that are right, not chosen.

The reference runs once more as it is (what is not deterministic shows), and once more with all
parameters and floating-point inputs changed by one unit of rounding (what rounding is amplified to
shows). Another way to split the same sums does no worse than `MARGIN` times what rounding does.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.parity.rank_files import Recorded

MARGIN: Final = 8.0
DROWNED: Final = 0.3
"""A quantity that rounding changes by such a share of itself is not compared."""

ROUNDING: Final = 1 / math.sqrt(12)
"""What is rounded once is off by this share of a unit on average; the perturbation is a whole one.

In a coarse dtype a result is rounded once, since its sum is accumulated in a finer one. Where sums
are accumulated in the dtype itself, rounding does as much as a whole unit.
"""

COARSE: Final = 2.0**-16
"""Sums of dtypes with a larger unit than this are accumulated in a finer one."""

_BLOCK: Final = 65_536
_FEW: Final = 16
"""What so few elements do in one run says little of what they may do."""


class Distance(NamedTuple):
    """How far a tensor is from a reference: the size of the difference, and the best factor."""

    size: float
    factor: float


class Common(NamedTuple):
    """What rounding does to the quantities of one kind on the whole.

    `noise` is how much it changes them, and `lean` which share of that is a common factor.
    """

    noise: float = 0.0
    lean: float = 0.0


class Exactness(NamedTuple):
    """How exact a quantity is, relative to itself.

    `unit` is the distance between two neighbouring numbers, `error` what one element of it may be
    off by if that is more (of a change, the unit of what is changed), and `computed` the unit of
    the coarsest dtype that it was computed in. `num_steps` were taken before: each has added
    rounding of its own, while the repeat was perturbed once. Such chances add up by their squares.
    """

    unit: float
    error: float = 0.0
    computed: float = 0.0
    num_steps: int = 0


class Measured(NamedTuple):
    """How far a quantity of the candidate is from that of the reference, and the repeats are.

    `size` is that of the reference; what follows is relative to it, unless it is zero. `noise` is
    what rounding changes, and `spread` how much of that a common factor is.
    """

    name: str
    size: float
    difference: float
    factor: float
    noise: float
    spread: float
    num_elements: int
    exactness: Exactness


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


def measure(
    name: str,
    reference: Recorded,
    candidate: Recorded,
    repeats: Sequence[Recorded],
    exactness: Exactness,
) -> Measured | None:
    """Measure one quantity of a run, and what the repeats of the reference do to it.

    The last of the `repeats` is the one that was perturbed. None if rounding alone changes the
    quantity so much that nothing can be said. Others that are the reference to the last bit may be
    left out.
    """
    size, (measured, *found) = distances(reference, [candidate, *repeats])
    if not math.isfinite(measured.size) and not np.isfinite(reference).all():
        return None
    is_coarse = max(exactness.unit, exactness.computed) > COARSE
    shares = [1.0] * (len(found) - 1) + [ROUNDING if is_coarse else 1.0]
    whole = size or 1.0
    if size and any(each.size > DROWNED * size for each in found):
        return None
    drift = math.sqrt(1 + exactness.num_steps)
    noises = (share * each.size / whole for share, each in zip(shares, found, strict=False))
    spreads = (share * abs(each.factor - 1) for share, each in zip(shares, found, strict=False))
    return Measured(
        name=name,
        size=size,
        difference=measured.size / whole,
        factor=measured.factor,
        noise=drift * max(noises, default=0.0),
        spread=drift * max(spreads, default=0.0),
        num_elements=reference.size,
        exactness=exactness,
    )


def in_common(measured: Iterable[Measured]) -> Common:
    """Return what rounding does to all of these: one run says too little of each alone."""
    noisy = [each for each in measured if each.noise and each.size]
    if not noisy:
        return Common()
    lean = statistics.median(each.spread / each.noise for each in noisy)
    return Common(statistics.median(each.noise for each in noisy), lean)


def difference_of(found: Measured, common: Common, *, sees_factor: bool = True) -> Difference:
    """Say how many times what rounding explains a difference is.

    `sees_factor`: a common factor is known better than each element.
    """
    if not math.isfinite(found.difference):
        return Difference(
            name=found.name, measured=math.inf, bound=0.0, ratio=math.inf, factor=math.nan
        )
    if not found.size:
        bound = MARGIN * found.noise
        ratio = found.difference / bound if bound else math.inf if found.difference else 0.0
        return Difference(name=found.name, measured=found.difference, bound=bound, ratio=ratio)
    noise = max(found.noise, common.noise) if found.num_elements < _FEW else found.noise
    bound = MARGIN * max(noise, found.exactness.unit, found.exactness.error)
    ratio = found.difference / bound
    if sees_factor:
        allowed = _allowed_factor(found, noise, common)
        if abs(found.factor - 1) / allowed > ratio:
            bound, ratio = allowed, abs(found.factor - 1) / allowed
    return Difference(
        name=found.name,
        measured=found.difference,
        bound=bound,
        ratio=ratio,
        factor=found.factor,
    )


def _allowed_factor(found: Measured, noise: float, common: Common) -> float:
    """Return how far a common factor may be from 1.

    The rounding of single elements averages out over them. What is left is what rounding does to
    all of them together, and one rounding of a scalar in either run, such as one over the number of
    samples.
    """
    averaged = max(noise, found.exactness.unit, found.exactness.error) / math.sqrt(
        found.num_elements
    )
    return MARGIN * max(found.spread, common.lean * noise, averaged) + found.exactness.unit


def compare(
    name: str, reference: Recorded, candidate: Recorded, repeats: Sequence[Recorded], unit: float
) -> Difference | None:
    """Compare one quantity by itself with what the repeats of the reference allow.

    None if rounding alone changes it so much that nothing can be said.
    """
    found = measure(name, reference, candidate, repeats, Exactness(unit))
    return None if found is None else difference_of(found, Common())
