"""The MessagePack form of a tree of stacks: small, though it may name a hundred thousand ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec

from distdiag.events.base import Frame
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack

# The stacks of many ranks as one prefix tree: where all are together, and where their paths part.
#
# A job of thousands of ranks stands in a few dozen places. So the tree keeps each distinct stack
# once with the ranks that have it, and makes the nodes between the outermost and the innermost
# frame when they are asked for. Trees of single nodes merge into the tree of the job in any order.

Stack = tuple[Frame, ...]
"""The frames of one thread, innermost first, as in `ThreadStack`."""

MAIN: Final = "MainThread"

_ALSO_MAIN: Final = f"another {MAIN}"
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose stacks are equal, frame by frame and line by line."""

    frames: Stack
    ranks: RankSet


@dataclass(frozen=True, slots=True)
class StackNode:
    """One frame of the tree with the groups that pass through it.

    `depth` counts the frames from the outermost one to this one. The root, above all of them, has
    no frame, and neither has the node that stands for the ranks that go no deeper than its parent.
    """

    frame: Frame | None
    depth: int
    groups: tuple[StackGroup, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks; one with several threads of the same kind counts for each stack."""
        return sum(len(group.ranks) for group in self.groups)

    @property
    def ranks(self) -> RankSet:
        """The ranks whose stacks pass through this frame or end here."""
        return RankSet(chain.from_iterable(group.ranks for group in self.groups))

    @property
    def children(self) -> tuple[StackNode, ...]:
        """The frames called from here, and a node without a frame if the stacks of ranks end here.

        The node with the most ranks comes first.
        """
        called: dict[Frame | None, list[StackGroup]] = {}
        for group in self.groups:
            has_more = len(group.frames) > self.depth
            called.setdefault(group.frames[-1 - self.depth] if has_more else None, []).append(group)
        nodes = (StackNode(frame, self.depth + 1, tuple(gs)) for frame, gs in called.items())
        return tuple(sorted(nodes, key=lambda node: _order(node.num_ranks, node.groups[0].ranks)))


@dataclass(frozen=True, slots=True)
class Parting:
    """A place where the paths of ranks part.

    `common` is the path that they share, the last common frame first (empty when the outermost
    frames differ already); `branches` are the ways on, the one with the most ranks first.
    """

    common: Stack
    branches: tuple[StackNode, ...]

    @property
    def majority(self) -> StackNode | None:
        """The branch with the most ranks, or None when two have equally many."""
        first, second = self.branches[:2]
        return first if first.num_ranks > second.num_ranks else None

    @property
    def odd_ranks(self) -> RankSet:
        """The ranks that leave the majority here; empty when there is no majority."""
        if self.majority is None:
            return RankSet()
        return RankSet(chain.from_iterable(branch.ranks for branch in self.branches[1:]))


@dataclass(frozen=True, slots=True)
class StackTree:
    """The stacks of all threads of some ranks, equal ones together.

    `threads` maps the name of a thread to its distinct stacks and the ranks that have them.
    `MAIN` is the thread that runs the script, in which a rank has one stack; in names of other
    threads ``#`` stands for every number, so that ``Thread-3 (read)`` and ``Thread-5 (read)`` are
    one. `unread` are the ranks without stacks by the reason why there are none.
    """

    threads: Mapping[str, Mapping[Stack, RankSet]]
    unread: Mapping[str, RankSet]

    @classmethod
    def from_stacks(cls, dumps: Iterable[Stacks]) -> StackTree:
        """Build the tree of some ranks; of a rank that was dumped twice, the last stacks count."""
        last: dict[int, Stacks] = {}
        for stacks in dumps:
            if stacks.rank not in last or not stacks.error:  # what was once seen is kept
                last[stacks.rank] = stacks
        gathered = _Gathered()
        for rank, stacks in last.items():
            if stacks.error or not stacks.threads:
                gathered.add_unread(stacks.error or "no thread was seen", (rank,))
            main = _main_thread(stacks.threads)
            for thread in stacks.threads:
                gathered.add(MAIN if thread is main else _kind(thread.name), thread.frames, (rank,))
        return gathered.tree()

    @property
    def ranks(self) -> RankSet:
        """All ranks of the tree, those without stacks included."""
        stacks = chain.from_iterable(by_stack.values() for by_stack in self.threads.values())
        return RankSet(chain.from_iterable(chain(stacks, self.unread.values())))

    def groups(self, thread: str = MAIN) -> tuple[StackGroup, ...]:
        """Return the groups of ranks with equal stacks, the largest first."""
        groups = [StackGroup(*item) for item in self.threads.get(thread, {}).items()]
        return tuple(sorted(groups, key=lambda g: _order(len(g.ranks), g.ranks)))

    def root(self, thread: str = MAIN) -> StackNode:
        """Return the node above the outermost frames."""
        return StackNode(None, 0, self.groups(thread))


def merge(trees: Iterable[StackTree]) -> StackTree:
    """Return one tree of all ranks; no rank should be in two trees."""
    gathered = _Gathered()
    for tree in trees:
        for name, by_stack in tree.threads.items():
            for frames, ranks in by_stack.items():
                gathered.add(name, frames, ranks)
        for reason, ranks in tree.unread.items():
            gathered.add_unread(reason, ranks)
    return gathered.tree()


def parted(tree: StackTree, thread: str = MAIN) -> tuple[Parting, ...]:
    """Follow most of the ranks inwards; return each place where others leave them, in this order.

    Where two branches have equally many ranks, nothing tells which one to follow: that place is the
    last.
    """
    partings: list[Parting] = []
    path: list[Frame] = []
    node = tree.root(thread)
    while branches := node.children:
        if len(branches) > 1:
            partings.append(Parting(tuple(reversed(path)), branches))
        node = branches[0]
        if node.frame is None or (len(branches) > 1 and partings[-1].majority is None):
            break
        path.append(node.frame)
    return tuple(partings)


class _Gathered:
    """What becomes a tree: the ranks of each stack, in any order."""

    def __init__(self) -> None:
        self._threads: dict[str, dict[Stack, list[int]]] = {MAIN: {}}
        self._unread: dict[str, list[int]] = {}

    def add(self, name: str, frames: Stack, ranks: Iterable[int]) -> None:
        self._threads.setdefault(name, {}).setdefault(frames, []).extend(ranks)

    def add_unread(self, reason: str, ranks: Iterable[int]) -> None:
        self._unread.setdefault(reason, []).extend(ranks)

    def tree(self) -> StackTree:
        threads = {
            name: {frames: RankSet(ranks) for frames, ranks in by_stack.items()}
            for name, by_stack in self._threads.items()
        }
        unread = {reason: RankSet(ranks) for reason, ranks in self._unread.items()}
        return StackTree(threads, unread)


def _main_thread(threads: tuple[ThreadStack, ...]) -> ThreadStack | None:
    """Return the thread that runs the script: by its name, else by whose code it runs."""
    named = (thread for thread in threads if thread.name == MAIN)
    with_user = (thread for thread in threads if any(frame.user for frame in thread.frames))
    return next(chain(named, with_user, threads), None)


def _kind(name: str) -> str:
    return _ALSO_MAIN if name == MAIN else _NUMBER.sub("#", name)


def _order(num_ranks: int, ranks: RankSet) -> tuple[int, int]:
    """Sort by size, the largest first, then by the lowest rank."""
    return (-num_ranks, next(iter(ranks), -1))


# The MessagePack form of a tree.

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
