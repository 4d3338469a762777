"""What the data of each coordinate gives by itself, beside the gradients of the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from distdiag.parity.explanations import Pair
from distdiag.parity.recorded_run import Array, RecordedRun
from distdiag.recording import Kind

_FIT: Final = 0.02


def gradients_of(
    pairs: Sequence[Pair], alone: Sequence[RecordedRun]
) -> tuple[list[Pair], list[list[Array]]]:
    """Return the gradients that all runs on the data of one coordinate have, and those of each."""
    kept: list[Pair] = []
    parts: list[list[Array]] = [[] for _ in alone]
    for pair in pairs:
        arrays = [run.whole(Kind.GRADIENT, 0, pair.difference.name) for run in alone]
        known = [array for array in arrays if array is not None]
        if pair.reference.size and len(known) == len(alone):
            kept.append(pair)
            for part, array in zip(parts, known, strict=True):
                part.append(array)
    return kept, parts


def is_mean_of(pairs: Sequence[Pair], parts: Sequence[Sequence[Array]]) -> bool:
    """Say whether the candidate's gradients are the means of those of the coordinates alone.

    As exactly as tells it from the reference's: then each rank computes what it should of its
    batch, and the reference differs since it has all samples in one batch.
    """
    rest = moved = 0.0
    for pair, arrays in zip(pairs, zip(*parts, strict=True), strict=True):
        mean = np.mean(arrays, axis=0)
        rest += float(np.square(pair.candidate - mean).sum())
        moved += float(np.square(pair.candidate - pair.reference).sum())
    return bool(moved) and rest <= _FIT**2 * moved
