"""Pair sends with receives by process group, source, destination and tag."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from distdiag.alignment import Alignment
from distdiag.engine.collectives import GroupKey, group_key
from distdiag.event import Collective
from distdiag.ranks import RankSet

MessageAlignment = Alignment[Collective]
_Lane = tuple[GroupKey, int, int, int]


@dataclass(slots=True)
class _Queues:
    sends: deque[Collective] = field(default_factory=deque)
    receives: deque[Collective] = field(default_factory=deque)
    num_paired: int = 0


class Messages:
    """The sends and receives that have not met yet."""

    def __init__(self, world: RankSet) -> None:
        """Start with none; only messages between the ranks of `world` are observed."""
        self._world = world
        self._lanes: dict[_Lane, _Queues] = {}
        self._open_receives: dict[tuple[GroupKey, int, int], deque[Collective]] = {}

    def leave_out(self, rank: int) -> None:
        """Expect nothing of a rank: it runs, and is not observed."""
        self._world = RankSet(set(self._world) - {rank})

    def add(self, call: Collective) -> MessageAlignment | None:
        """Take in a send or receive; return the pair if it completes one that disagrees."""
        tag = _tag(call)
        group = group_key(call.group)
        if call.signature.op == "recv_any_source":
            self._add_open_receive(call, group, tag)
            return None
        peer = call.signature.peer
        if peer is None or peer not in self._world:
            return None
        is_send = call.signature.op == "send"
        source, destination = (call.rank, peer) if is_send else (peer, call.rank)
        if is_send and self._take_open_receive(group, destination, tag):
            return None
        lane = (group, source, destination, tag)
        queues = self._lanes.setdefault(lane, _Queues())
        mine, theirs = (
            (queues.sends, queues.receives) if is_send else (queues.receives, queues.sends)
        )
        if not theirs:
            mine.append(call)
            return None
        other = theirs.popleft()
        queues.num_paired += 1
        pair = _alignment(lane, queues.num_paired - 1, call, other)
        return None if _agree(call, other) else pair

    def _add_open_receive(self, call: Collective, group: GroupKey, tag: int) -> None:
        # Which send it gets is decided by arrival: any one that waits for this rank will do.
        for (lane_group, _, destination, lane_tag), queues in self._lanes.items():
            if (lane_group, destination, lane_tag) == (group, call.rank, tag) and queues.sends:
                queues.sends.popleft()
                return
        self._open_receives.setdefault((group, call.rank, tag), deque()).append(call)

    def _take_open_receive(self, group: GroupKey, destination: int, tag: int) -> bool:
        waiting = self._open_receives.get((group, destination, tag))
        if not waiting:
            return False
        waiting.popleft()
        return True

    def unmatched(self) -> Iterator[MessageAlignment]:
        """Yield for each lane the first call that has no counterpart."""
        for lane, queues in self._lanes.items():
            for queue in (queues.sends, queues.receives):
                if queue:
                    yield _alignment(lane, queues.num_paired, queue[0])

    def waiting(self, rank: int) -> Iterator[Collective]:
        """Yield the calls of a rank that have no counterpart yet."""
        for queues in self._lanes.values():
            yield from (call for call in (*queues.sends, *queues.receives) if call.rank == rank)


def _tag(call: Collective) -> int:
    # NCCL has no tags: it pairs by order alone.
    return 0 if "nccl" in call.group.backend else call.signature.tag or 0


def _agree(call: Collective, other: Collective) -> bool:
    mine, theirs = call.signature, other.signature
    return (mine.input_sizes or mine.output_sizes) == (
        theirs.input_sizes or theirs.output_sizes
    ) and mine.dtypes == theirs.dtypes


def _alignment(lane: _Lane, index: int, *calls: Collective) -> MessageAlignment:
    _, source, destination, tag = lane
    return Alignment(
        kind="message",
        key=(calls[0].group.label, source, destination, tag, index),
        by_rank={call.rank: call for call in calls},
        expected_ranks=RankSet((source, destination)),
    )
