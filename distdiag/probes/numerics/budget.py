"""How much of the time of a training reading its numbers may take."""

from __future__ import annotations

import time
from types import TracebackType


class Budget:
    """Measures the host's time in ``with`` blocks, against all the time since the first of them.

    What a device does meanwhile is not counted: reading a tensor takes the host much longer to
    launch than the device to do.
    """

    __slots__ = ("_begun_s", "_depth", "_entered_s", "_spent_s", "share")

    def __init__(self, share: float) -> None:
        """Allow `share` of the time, from 0 to 1."""
        self.share = share
        self._begun_s = 0.0
        self._entered_s = 0.0
        self._spent_s = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._entered_s = time.perf_counter()
            self._begun_s = self._begun_s or self._entered_s
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent_s += time.perf_counter() - self._entered_s

    def is_left(self, part: float = 1.0) -> bool:
        """Say whether less than this part of the share of the time was spent so far."""
        passed_s = time.perf_counter() - self._begun_s
        return self.share >= 1 or self._spent_s <= part * self.share * passed_s
