"""The indices of one pass over a data set, as they go by."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from typing import Any, Final

import torch
import xxhash

from distdiag.data_event import MOST_INDICES

_SHOWN: Final = 8


class IndexStream:
    """Takes note of indices in their order; `is_opaque` if they are no numbers."""

    def __init__(self, *, keeps: bool) -> None:
        """Have seen none yet; `keeps`: remember which ones they are."""
        self.is_opaque = False
        self.is_ascending = True
        self.num = 0
        self.first: tuple[int, ...] = ()
        self.fetched: deque[tuple[str, int]] = deque()
        """Digests and sizes of batches that were asked for and have not been handed out yet."""
        self._keeps = keeps
        self._last = -1
        self._state = xxhash.xxh3_64()
        self._all = array("q")

    def add(self, index: Any) -> None:  # noqa: ANN401
        """Take note of one index, or of those of a batch."""
        if self.is_opaque:
            return
        whole = index if isinstance(index, list | tuple) else [index]
        try:
            # The number in a tensor may lie on a device.
            batch = array("q", [] if any(isinstance(i, torch.Tensor) for i in whole) else whole)
        except (TypeError, OverflowError):
            self.is_opaque = True
            return
        if not batch:
            self.is_opaque = bool(whole)
            return
        content = batch.tobytes()
        self._state.update(content)
        self.num += len(batch)
        self.fetched.append((xxhash.xxh3_64_hexdigest(content), len(batch)))
        if self.is_ascending:
            row = [self._last, *batch]
            self.is_ascending = all(a < b for a, b in itertools.pairwise(row))
            self._last = batch[-1]
        if len(self.first) < _SHOWN:
            self.first = (*self.first, *batch)[:_SHOWN]
        if self._keeps and self.num <= MOST_INDICES:
            self._all.extend(batch)

    @property
    def digest(self) -> str:
        """A digest of all indices in their order."""
        return self._state.hexdigest()

    def bitmap(self) -> bytes:
        """Return which indices there were, one bit for each; nothing if they are not known."""
        if len(self._all) != self.num or not self._all or min(self._all) < 0:
            return b""
        largest = max(self._all)
        if largest >= MOST_INDICES:
            return b""
        bits = bytearray(largest // 8 + 1)
        for index in self._all:
            bits[index >> 3] |= 1 << (index & 7)
        return bytes(bits)
