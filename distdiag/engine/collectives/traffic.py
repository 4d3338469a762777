"""How much a call carries, and which ranks get to know something of one another by it."""

import math
from dataclasses import dataclass
from typing import Final

from distdiag.events.collectives import Collective, Sizes

_ONE_WAY: Final = frozenset(("gather", "gather_object", "reduce", "barrier", "monitored_barrier"))
"""Collectives after which all but one rank know no more than before."""

_BYTES: Final = {"64": 8, "32": 4, "16": 2, "8": 1, "complex128": 16, "complex64": 8, "bool": 1}


def element_bytes(dtype: str) -> int:
    """Return the size of an element of a type such as ``bfloat16`` or ``float8_e4m3fn``."""
    name = dtype.rpartition(".")[2].partition("_")[0]
    if name in _BYTES:
        return _BYTES[name]
    return next((size for bits, size in _BYTES.items() if name.endswith(bits)), 8)


def carried_bytes(call: Collective, ranks: frozenset[int]) -> int:
    """Return how many bytes a call carries between at least two of these ranks."""
    signature = call.signature
    if signature.op in _ONE_WAY:
        return 0
    if signature.peer is not None:
        reached = ranks & {call.rank, signature.peer}
    else:
        reached = ranks.intersection(call.group.ranks)
    if len(reached) < 2:
        return 0
    size = max(_num_elements(signature.input_sizes), _num_elements(signature.output_sizes))
    return size * max(map(element_bytes, signature.dtypes), default=8)


def _num_elements(sizes: Sizes) -> int:
    return sum(math.prod(each) for each in sizes)


@dataclass(slots=True)
class _Carried:
    """What one rank's calls have carried between certain ranks."""

    step: int = 0
    now: int = 0
    most: int = 0
    total: int = 0

    def add(self, size: int, step: int) -> None:
        self.now = size + (self.now if step == self.step else 0)
        self.step = step
        self.most = max(self.most, self.now)
        self.total += size


class Traffic:
    """Counts what passes between ranks once they have stepped."""

    def __init__(self) -> None:
        self._carried: dict[tuple[int, frozenset[int]], _Carried] = {}

    def add(self, call: Collective) -> None:
        """Take note of a call; those before the first step only make copies alike."""
        if call.step < 1:
            return
        reached = _reached(call)
        size = carried_bytes(call, reached)
        if size:
            found = self._carried.get((call.rank, reached))
            if found is None:
                found = self._carried[call.rank, reached] = _Carried()
            found.add(size, call.step)

    def between(self, ranks: frozenset[int]) -> tuple[int, int]:
        """Return how many bytes passed between these ranks, at most in one step and in all."""
        most, totals = 0, dict.fromkeys(ranks, 0)
        for (rank, reached), found in self._carried.items():
            if rank in ranks and len(ranks & reached) > 1:
                most = max(most, found.most)
                totals[rank] += found.total
        return most, max(totals.values(), default=0)


class Surplus:
    """Measures how much more a later step carries than the first ones do."""

    def __init__(self, num_first: int) -> None:
        self._num_first = num_first
        self._now: dict[tuple[int, frozenset[int]], tuple[int, int]] = {}
        self._most: dict[tuple[int, frozenset[int], bool], int] = {}

    def add(self, call: Collective) -> None:
        """Take note of a call; those before the first step only make copies alike."""
        reached = _reached(call)
        size = carried_bytes(call, reached) if call.step else 0
        if size:
            key = (call.rank, reached)
            step, now = self._now.get(key, (0, 0))
            now = size + (now if step == call.step else 0)
            self._now[key] = (call.step, now)
            place = (*key, call.step >= self._num_first)
            self._most[place] = max(self._most.get(place, 0), now)

    def between(self, ranks: frozenset[int]) -> int:
        """Return by how many bytes a later step exceeds the first ones for one of these ranks."""
        more = 0
        for (rank, reached, is_late), most in self._most.items():
            if is_late and rank == min(ranks) and len(ranks & reached) > 1:
                more += max(0, most - self._most.get((rank, reached, False), 0))
        return more


def _reached(call: Collective) -> frozenset[int]:
    peer = call.signature.peer
    return frozenset(call.group.ranks if peer is None else (call.rank, peer))
