"""Which activations come near the largest number of their dtype."""

from __future__ import annotations

from typing import Final

import torch

from distdiag.events.numerics import NearOverflow
from distdiag.probes.numerics.ranges import Reading
from distdiag.record.recorder import Recorder

_NARROW: Final = (torch.float16,)
"""Of bfloat16 and wider types the largest number is 3e38: what comes near it is no activation."""
_NEAR: Final = 0.5
"""One more doubling overflows."""
_MOST_TOLD: Final = 16


class NearLimits:
    """Writes down each module whose output comes near the limit, at the first time."""

    def __init__(self, recorder: Recorder) -> None:
        """Know of no module yet."""
        self._recorder = recorder
        self._first: dict[tuple[str, str, str], tuple[float, int]] = {}
        self._told: set[tuple[str, str, str]] = set()

    def judge(self, reading: Reading, step: int) -> None:
        """Take in what was read of one activation."""
        if reading.stage != "forward" or reading.dtype not in _NARROW or reading.value:
            return
        earlier, earlier_step = self._first.setdefault(reading.place, (reading.largest, step))
        limit = torch.finfo(reading.dtype).max
        is_told = reading.place in self._told or len(self._told) >= _MOST_TOLD
        # What is as large as can be was filled in, as masks are.
        if not _NEAR * limit < reading.largest < limit or is_told:
            return
        self._told.add(reading.place)
        self._recorder.event(
            NearOverflow,
            step=step,
            model=reading.model,
            module=reading.module,
            module_class=reading.kind,
            dtype=str(reading.dtype).removeprefix("torch."),
            largest=reading.largest,
            limit=limit,
            earlier=earlier,
            earlier_step=earlier_step,
        )
