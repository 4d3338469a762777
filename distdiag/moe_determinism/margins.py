"""How far the scores lie apart at the boundary of a choice, counted in roundings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from distdiag.moe_determinism.recordings import Choices, Numbers
from distdiag.routing_difference import MarginBin

UNIT: Final[Mapping[str, float]] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
"""The distance from 1 to the next number, by dtype."""
MOST_ROUNDINGS: Final[Mapping[str, float]] = {
    "float64": 4096.0,
    "float32": 1024.0,
    "float16": 8.0,
    "bfloat16": 4.0,
}
"""So many units another order of the same additions may change a result.

Sums in float16 and bfloat16 are accumulated in a finer type and rounded once.
"""
EDGES: Final = (0.0, *(2.0**n for n in (0, 2, 4, 6, 8, 10, 13, 16, 18, 21)), float("inf"))


def bound(dtypes: Iterable[str]) -> float:
    """Return how far apart, relative to the greatest value, rounding in these types may bring."""
    known = [UNIT[name] * MOST_ROUNDINGS[name] for name in dtypes if name in UNIT]
    return max(known, default=UNIT["float32"] * MOST_ROUNDINGS["float32"])


def margins(choices: Choices) -> Numbers:
    """Return for each token by how much the choice was made; infinite where all were chosen."""
    with np.errstate(invalid="ignore"):
        found = choices.inner - choices.outer
    return np.where(np.isnan(found), 0.0, found)


def roundings(margin: Numbers, size: Numbers, dtype: str) -> Numbers:
    """Return margins in units of rounding of the greatest score of each token."""
    unit = UNIT.get(dtype, UNIT["float32"]) * size
    return np.where(margin <= 0, 0.0, margin / np.where(unit > 0, unit, 1.0))


class Histogram:
    """Counts tokens and flipped tokens by margin."""

    def __init__(self, dtypes: Iterable[str]) -> None:
        """Count for runs that compute in these types."""
        self._bound = bound(dtypes)
        self._limit = 0.0
        self._tokens = np.zeros(len(EDGES), np.int64)
        self._flipped: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def add(
        self, step: int, found: Numbers, dtype: str, flipped: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> None:
        """Count tokens with these margins, in roundings of their scores."""
        self._limit = max(self._limit, self._bound / UNIT.get(dtype, UNIT["float32"]))
        places = np.searchsorted(np.array(EDGES), found)
        self._tokens += np.bincount(places, minlength=len(EDGES))
        if flipped.any():
            counts = np.bincount(places[flipped], minlength=len(EDGES))
            self._flipped[step] = self._flipped.get(step, 0) + counts

    def bins(self) -> tuple[MarginBin, ...]:
        """Return the counts."""
        none = np.zeros(len(EDGES), np.int64)
        first = self._flipped[min(self._flipped)] if self._flipped else none
        flipped = sum(self._flipped.values(), none)
        return tuple(
            MarginBin(
                up_to=edge,
                num_tokens=int(self._tokens[place]),
                num_flipped=int(flipped[place]),
                num_flipped_first=int(first[place]),
                is_numeric=edge <= self._limit,
            )
            for place, edge in enumerate(EDGES)
        )
