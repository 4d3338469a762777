"""The MessagePack form of a tree of stacks: small, though it may name a hundred thousand ranks."""

from __future__ import annotations

from typing import Final

import msgspec

from distdiag.errors import UNDECODABLE, DamagedFileError
from distdiag.event import Frame
from distdiag.ranks import RankSet
from distdiag.stack_tree import Stack, StackTree

MOST_RANKS: Final = 1 << 20
"""No rank has a number as large as this; a larger one means a damaged tree."""
MOST_MEMBERS: Final = 1 << 23
"""No tree names more ranks than this, counted once for each stack."""


class _WireTree(msgspec.Struct, frozen=True, array_like=True):
    """Frames are numbers, rank sets are pairs: so many ranks are left out, so many are in."""

    frames: tuple[Frame, ...]
    threads: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]
    unread: dict[str, tuple[int, ...]]


_decode_wire: Final = msgspec.msgpack.Decoder(_WireTree).decode


def encode_tree(tree: StackTree) -> bytes:
    """Return the compact MessagePack form: every frame once, rank sets as ranges."""
    numbers: dict[Frame, int] = {}
    threads = {
        name: tuple(
            (tuple(numbers.setdefault(frame, len(numbers)) for frame in frames), _spans(ranks))
            for frames, ranks in by_stack.items()
        )
        for name, by_stack in tree.threads.items()
    }
    unread = {reason: _spans(ranks) for reason, ranks in tree.unread.items()}
    return msgspec.msgpack.encode(_WireTree(tuple(numbers), threads, unread))


class TreeDecoder:
    """Read trees of many nodes; equal stacks of all of them become one object."""

    def __init__(self) -> None:
        """Start with no frames."""
        self._frames: dict[Frame, Frame] = {}
        self._stacks: dict[Stack, Stack] = {}

    def decode(self, data: bytes | memoryview) -> StackTree:
        """Return the tree that `encode_tree` wrote.

        Raises:
            DamagedFileError: the bytes are not a tree.

        """
        try:
            wire = _decode_wire(data)
            frames = [self._frames.setdefault(frame, frame) for frame in wire.frames]
            room = [MOST_MEMBERS]
            threads = {
                name: {self._stack(frames, stack): _ranks(spans, room) for stack, spans in stacks}
                for name, stacks in wire.threads.items()
            }
            unread = {reason: _ranks(spans, room) for reason, spans in wire.unread.items()}
        except (*UNDECODABLE, ValueError) as error:
            raise DamagedFileError(f"a tree of stacks is damaged: {error}") from None
        return StackTree(threads, unread)

    def _stack(self, frames: list[Frame], numbers: tuple[int, ...]) -> Stack:
        if any(not 0 <= number < len(frames) for number in numbers):
            raise ValueError("a stack refers to a frame that is not there")
        stack = tuple(frames[number] for number in numbers)
        return self._stacks.setdefault(stack, stack)


def _spans(ranks: RankSet) -> tuple[int, ...]:
    """Return ``(3, 2, 1, 4)`` for the ranks 3, 4, 6, 7, 8, 9: skip 3, take 2, skip 1, take 4."""
    spans: list[int] = []
    end = 0
    for rank in ranks:
        if spans and rank == end:
            spans[-1] += 1
        else:
            spans += (rank - end, 1)
        end = rank + 1
    return tuple(spans)


def _ranks(spans: tuple[int, ...], room: list[int]) -> RankSet:
    """Undo `_spans`; `room` holds how many more ranks the tree may name."""
    ranks: list[int] = []
    end = 0
    if len(spans) % 2:
        raise ValueError("a set of ranks is cut off")
    for skipped, count in zip(spans[::2], spans[1::2], strict=True):
        first, end = end + skipped, end + skipped + count
        room[0] -= count
        if skipped < 0 or count < 1 or end > MOST_RANKS or room[0] < 0:
            raise ValueError("a set of ranks is out of bounds")
        ranks += range(first, end)
    if not ranks:
        raise ValueError("a set of ranks is empty")
    return RankSet(ranks)
