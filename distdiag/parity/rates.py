"""The learning rates of two runs. Nothing rounds them, so any difference is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.disparity import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.recorded_run import RecordedRun
from distdiag.recording import Kind

_SAME: Final = 1e-6


class Rates:
    """The learning rates of all groups of parameters."""

    def __init__(self, reference: RecordedRun, candidate: RecordedRun) -> None:
        """Compare these runs."""
        self._reference = reference
        self._candidate = candidate

    def details(self, step: int) -> list[str]:
        """Say which ranks have other learning rates than the reference."""
        due = self._due(step)
        return [
            f"rank {rank} has the learning rates {values}, not {due}"
            for rank, values in self._by_rank(step).items()
            if due is not None and values != due
        ]

    def pairs(self, step: int) -> Iterator[Pair]:
        """Yield the learning rates of a step, those of the rank that is furthest off."""
        due = self._due(step) or ()
        found = [values for values in self._by_rank(step).values() if len(values) == len(due)]
        for number, rate in enumerate(due):
            others = [values[number] for values in found]
            if not rate or not others:
                continue
            other = max(others, key=lambda each: abs(each - rate))
            relative = abs(other / rate - 1)
            difference = Difference(
                name=f"learning rate of parameter group {number}",
                measured=relative,
                bound=_SAME,
                ratio=relative / _SAME if math.isfinite(relative) else math.inf,
                factor=other / rate,
            )
            yield Pair(difference, np.array([rate]), np.array([other]))

    def _due(self, step: int) -> tuple[float, ...] | None:
        return next(iter(_values(self._reference, step).values()), None)

    def _by_rank(self, step: int) -> dict[int, tuple[float, ...]]:
        return _values(self._candidate, step)


def _values(run: RecordedRun, step: int) -> dict[int, tuple[float, ...]]:
    records = run.by_rank(Kind.RATE, step, 0, "rates")
    return {
        rank: tuple(float(value) for value in record.values or () if value is not None)
        for rank, record in records.items()
    }
