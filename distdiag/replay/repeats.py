"""Finds what repeats in a sequence, so that a loop reads as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

LONGEST_BLOCK: Final = 64


class Repeat(NamedTuple):
    """So many times the same block, one after the other."""

    block: tuple[object, ...]
    times: int


def repeats(sequence: Sequence[T]) -> list[Repeat]:
    """Return blocks that, repeated and joined, are the sequence.

    Example: ``a b a b a b c`` is ``(a b) * 3`` and ``(c) * 1``.
    """
    found: list[Repeat] = []
    start = 0
    while start < len(sequence):
        size, times = _longest(sequence, start)
        block = tuple(sequence[start : start + size])
        if times == 1 and found and found[-1].times == 1:
            found[-1] = Repeat(found[-1].block + block, 1)
        else:
            found.append(Repeat(block, times))
        start += size * times
    return found


def _longest(sequence: Sequence[T], start: int) -> tuple[int, int]:
    """Return size and number of the block at `start` whose repeats reach furthest."""
    best = (1, 1)
    for size in range(1, min(LONGEST_BLOCK, (len(sequence) - start) // 2) + 1):
        block = sequence[start : start + size]
        times, end = 1, start + size
        while sequence[end : end + size] == block:
            times, end = times + 1, end + size
        if times > 1 and size * times > best[0] * best[1]:
            best = (size, times)
    return best
