"""The norm by which gradients were clipped, against that of the whole gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.disparity import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.tolerance import MARGIN
from distdiag.recording import Kind

ACCURACY: Final = 1e-3
"""Kernels that sum up squares in float32 are better than this; a wrong norm is far worse."""


def norm_pairs(reference: RecordedRun, candidate: RecordedRun, step: int) -> Iterator[Pair]:
    """Yield the norm that clipping used, as a multiple of that of all gradients.

    Whatever is clipped, that multiple is the same on any number of ranks.
    """
    ours, theirs = _multiple(reference, step), _multiple(candidate, step)
    if ours is None or theirs is None:
        return
    names = reference.names(Kind.GRADIENT, step)
    units = (reference.unit(Kind.GRADIENT, step, name) for name in names)
    bound = max(ACCURACY, MARGIN * max(units))
    factor = theirs / ours
    difference = Difference(
        name="norm that clipping used",
        measured=abs(factor - 1),
        bound=bound,
        ratio=abs(factor - 1) / bound,
        factor=factor,
    )
    yield Pair(difference, np.array([ours, ours]), np.array([theirs, theirs]))


def _multiple(run: RecordedRun, step: int) -> float | None:
    """Return the used norm over the norm of the whole gradients, of the rank furthest from one."""
    used = [r.values[0] for r in run.by_rank(Kind.NORM, step, 0, "norm").values() if r.values]
    norms = [float(value) for value in used if isinstance(value, int | float)]
    whole = [run.whole(Kind.GRADIENT, step, name) for name in run.names(Kind.GRADIENT, step)]
    if not norms or not whole or any(each is None for each in whole):
        return None
    size = math.sqrt(sum(float(np.vdot(each, each)) for each in whole if each is not None))
    if not size or not all(map(math.isfinite, norms)) or min(norms) <= 0:
        return None
    return max((norm / size for norm in norms), key=lambda multiple: abs(math.log(multiple)))
