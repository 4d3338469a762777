"""Align the calls that create process groups: all ranks of a scope must make them in one order."""

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from distdiag.engine.bounded import BySite, Recent, Turns
from distdiag.engine.clocks import Clock, Gate, Joiner, Stamp
from distdiag.engine.collectives.sync_edges import Senders
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import (
    Collective,
    GroupCreated,
    GroupProgress,
    ProcessGroup,
    stands_in,
)
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment

# Align the collectives of each process group by `collective_seq_id`.

GroupKey = tuple[str, int, tuple[int, ...]]
CollectiveAlignment = Alignment[Collective]


def group_key(group: ProcessGroup) -> GroupKey:
    """Tell groups apart: names are used again after a new initialisation."""
    return (group.name, group.generation, group.ranks)


Place = tuple[tuple[Frame, ...], str | None]
"""The part of a call site that two ranks are compared by: the user's frames and the module."""

_MOST_PATTERNS: Final = 64
"""A loop whose ranks differ on purpose does so in few ways; what comes again after so many others
is compared once more."""
_MOST_IDLE: Final = 256
"""So many process groups, and lanes of messages, are remembered in which nobody waits."""
_MOST_UNMATCHED: Final = 10_000
"""So many lanes are followed in which more was sent than received, or less."""


def _place_of(site: CallSite) -> Place | None:
    """Return the place that other ranks call from, too; None where any place will do."""
    return None if stands_in(site) else (site.user_frames, site.module)


class GroupStream:
    """The collectives of one process group, as far as they are not settled."""

    def __init__(self, group: ProcessGroup, world: RankSet, places: BySite[Place | None]) -> None:
        """Start with nothing seen; only the ranks of `world` are observed."""
        self.group = group
        self.ranks = RankSet(set(group.ranks) & set(world))
        self.broken = False
        self.parted: CollectiveAlignment | None = None
        self._places = places
        self._open: dict[int, dict[int, Collective]] = {}
        self._progress: dict[int, GroupProgress] = {}
        self._enqueued: dict[int, int] = {}
        self._lost: set[int] = set()
        self._resumed: dict[int, int] = {}
        self._unended: dict[int, dict[int, Collective]] = {}
        self._known: Recent[tuple[tuple[int, int, int], ...], CollectiveAlignment]
        self._known = Recent(_MOST_PATTERNS)

    def add(self, call: Collective) -> CollectiveAlignment | None:
        """Take in one call; return the alignment if it completes one that the ranks disagree on."""
        seq_id = call.collective_seq_id
        by_rank = self._open.setdefault(seq_id, {})
        by_rank[call.rank] = call
        if call.rank in self._lost:
            self._resume(call.rank, seq_id)
        if len(by_rank) < len(self.ranks) and not self._is_whole(seq_id, by_rank):
            return None
        return self._settle(seq_id, by_rank)

    def advance(self, progress: GroupProgress) -> Iterator[CollectiveAlignment]:
        """Take in how far a rank is; yield the alignments that it completes, as `add` does."""
        self._progress[progress.rank] = progress
        if progress.enqueued is None:
            return
        self._enqueued[progress.rank] = progress.enqueued
        for seq_id in sorted(self._open):
            if self._is_whole(seq_id, self._open[seq_id]):
                alignment = self._settle(seq_id, self._open[seq_id])
                if alignment is not None:
                    yield alignment

    def leave_out(self, rank: int) -> Iterator[CollectiveAlignment]:
        """Expect nothing of a rank; yield the alignments that waited for it, as `add` does."""
        self.ranks = RankSet(set(self.ranks) - {rank})
        for seq_id, by_rank in sorted(self._open.items()):
            if len(by_rank) >= len(self.ranks):
                alignment = self._settle(seq_id, by_rank)
                if alignment is not None:
                    yield alignment

    def lose(self, rank: int) -> None:
        """Take note that calls of a rank were lost: how far it is shows when it calls again."""
        self._lost.add(rank)

    def _resume(self, rank: int, seq_id: int) -> None:
        """Take note of the first call of a rank after some were lost: it has made all before."""
        self._lost.discard(rank)
        self._resumed[rank] = seq_id
        for earlier in [number for number in self._open if number < seq_id]:
            if self._is_whole(earlier, self._open[earlier]):
                del self._open[earlier]

    def _missing(self, seq_id: int, by_rank: Collection[int]) -> set[int]:
        """Return the ranks that are known not to have come."""
        return {
            rank
            for rank in self.ranks
            if not (rank in by_rank or rank in self._lost or self._has_reached(rank, seq_id))
        }

    def _is_whole(self, seq_id: int, by_rank: dict[int, Collective]) -> bool:
        """Whether every rank has come, those included of which no record of this call is left."""
        if not (self._enqueued or self._resumed):
            return False
        others = (rank for rank in {*self._enqueued, *self._resumed} if rank not in by_rank)
        num_others = sum(self._has_reached(rank, seq_id) for rank in others)
        return len(by_rank) + num_others >= len(self.ranks)

    def _has_reached(self, rank: int, seq_id: int) -> bool:
        return self._enqueued.get(rank, -1) >= seq_id or self._resumed.get(rank, -1) > seq_id

    def _is_in(self, rank: int, seq_id: int) -> bool:
        """Whether a call of a rank is known not to have ended there."""
        progress = self._progress.get(rank)
        completed = progress.completed if progress is not None else None
        return completed is not None and completed < seq_id

    def _has_left(self, rank: int, seq_id: int) -> bool:
        """Whether a call is known to have ended on a rank, so that others do not wait in it."""
        completed = self._progress[rank].completed
        return completed is not None and completed >= seq_id

    def _settle(self, seq_id: int, by_rank: dict[int, Collective]) -> CollectiveAlignment | None:
        """Judge a call that all ranks have come to; return it if they disagree on it."""
        del self._open[seq_id]
        is_over = any(self._has_left(rank, seq_id) for rank in self._progress)
        if not is_over and any(self._is_in(rank, seq_id) for rank in by_rank):
            self._unended[seq_id] = by_rank
        if self.broken or self._agree(by_rank):
            return None
        pattern = tuple(sorted((rank, id(c.signature), id(c.site)) for rank, c in by_rank.items()))
        alignment = self._alignment(seq_id, by_rank)
        # The alignment is kept, so that the ids stay those of its calls.
        seen_before = self._known.of(pattern, lambda: alignment) is not alignment
        self._part(alignment)
        return None if seen_before else alignment

    def _agree(self, by_rank: dict[int, Collective]) -> bool:
        first, *others = by_rank.values()
        place = self._places.of(first.site)
        is_here = all(self._places.of(other.site) == place for other in others)
        if not is_here and self._are_apart(by_rank):
            return False
        self.parted = None
        return all(other.signature is first.signature for other in others)

    def _are_apart(self, by_rank: Mapping[int, Collective]) -> bool:
        places = {self._places.of(call.site) for call in by_rank.values()}
        return len(places - {None}) > 1

    def _part(self, alignment: CollectiveAlignment) -> None:
        """Remember where the call sites parted, until they meet again."""
        if not self._are_apart(alignment.by_rank):
            self.parted = None
        elif self.parted is None:
            self.parted = alignment

    def _alignment(
        self, seq_id: int, by_rank: dict[int, Collective], absent: Iterable[int] = ()
    ) -> CollectiveAlignment:
        expected: RankSet = self.ranks
        if self._progress or self._resumed or self._lost:
            expected = RankSet({*by_rank, *absent, *self._missing(seq_id, by_rank)})
        return Alignment(
            kind="collective",
            key=(self.group.label, seq_id),
            by_rank=dict(sorted(by_rank.items())),
            expected_ranks=expected,
            parted=self.parted,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits in it, and its next call is compared as its first one is."""
        is_followed = self._open or self._unended or self._progress
        return not (is_followed or self.broken or self.parted)

    def first_open(self) -> CollectiveAlignment | None:
        """Return the first point that not all ranks have reached.

        It may be one that all observed ranks have come to: where it is known that it has not ended,
        the ranks of the group that left nothing are those that did not come.
        """
        if self.broken:
            return None
        unended = min(self._unended, default=None)
        if unended is not None and unended < min(self._open, default=unended + 1):
            absent = set(self.group.ranks) - self.ranks
            return self._alignment(unended, self._unended[unended], absent) if absent else None
        for seq_id in sorted(self._open)[: None if self._lost else 1]:
            if not self._lost or self._missing(seq_id, self._open[seq_id]):
                return self._alignment(seq_id, self._open[seq_id])
        return None

    def waiting(self, rank: int) -> Iterator[Collective]:
        """Yield the calls of a rank that other ranks have not made yet, or that have not ended.

        What comes behind a call that has not ended waits for that one first.
        """
        in_call = [s for s, calls in self._unended.items() if rank in calls]
        held = [seq_id for seq_id in in_call if self._is_in(rank, seq_id)]
        if held:
            yield self._unended[min(held)][rank]
            return
        for seq_id, by_rank in self._open.items():
            if rank in by_rank and not (self._lost and not self._missing(seq_id, by_rank)):
                yield by_rank[rank]


class _OfWorld:
    """Calls that only the ranks of `world` are expected to make."""

    def __init__(self, world: RankSet) -> None:
        self._world = world

    def leave_out(self, rank: int) -> None:
        """Expect nothing of a rank: it runs, and is not observed."""
        self._world = RankSet(set(self._world) - {rank})


class CollectiveStreams(_OfWorld):
    """All process groups of a run."""

    def __init__(self, world: RankSet) -> None:
        super().__init__(world)
        self._places = BySite(_place_of)
        self._lossy: set[int] = set()
        self._streams: dict[GroupKey, GroupStream] = {}
        self._enough = 2 * _MOST_IDLE

    def stream(self, group: ProcessGroup) -> GroupStream:
        """Return the stream of a group, made at its first call."""
        key = group_key(group)
        if key not in self._streams:
            self._forget_idle()
            stream = self._streams[key] = GroupStream(group, self._world, self._places)
            for rank in self._lossy & set(stream.ranks):
                stream.lose(rank)
        return self._streams[key]

    def _forget_idle(self) -> None:
        """Forget the oldest groups of many in which nobody waits: programs make new ones."""
        if len(self._streams) < self._enough:
            return
        idle = [key for key, stream in self._streams.items() if stream.is_idle]
        for key in idle[:-_MOST_IDLE]:
            del self._streams[key]
        self._enough = max(2 * _MOST_IDLE, 2 * len(self._streams))

    def lose(self, rank: int) -> None:
        """Take note that calls of a rank were lost."""
        self._lossy.add(rank)
        for stream in self._streams.values():
            if rank in stream.ranks:
                stream.lose(rank)

    def all(self) -> tuple[GroupStream, ...]:
        """Return every group's stream, in order of their first calls."""
        return tuple(self._streams.values())

    def same_place(self, alignment: CollectiveAlignment) -> bool:
        """Whether all ranks made the call at one place of the program."""
        return len({self._places.of(call.site) for call in alignment.by_rank.values()}) == 1


# Match the calls of several ranks that belong together, and keep what each rank knew then.


class Meeting(Gate):
    """One collective, one message or one creation of a group.

    `stamps` holds what each rank that has come knew then, `expected` the observed ranks that come;
    `is_whole` says that there are no others.
    """

    __slots__ = ("_clocks", "_wanted", "expected", "is_whole", "num_expected", "number", "stamps")

    def __init__(self, number: int, expected: RankSet, *, is_whole: bool = True) -> None:
        super().__init__()
        self.number = number
        self.expected = expected
        self.num_expected = len(expected)
        self.is_whole = is_whole
        self.stamps: dict[int, Stamp] = {}
        self._clocks: dict[Senders, Clock] = {}
        self._wanted: set[int] = set()

    def is_awaited(self, rank: int) -> bool:
        """Whether somebody may go on now that this rank has come."""
        is_last = len(self.stamps) == self.num_expected
        return is_last or rank in self._wanted

    def is_ready(self, senders: Senders) -> bool:
        """Whether all these ranks have come."""
        stamps = self.stamps
        if senders is None:
            return len(stamps) == self.num_expected
        return all(rank in stamps or rank not in self.expected for rank in senders)

    def want(self, senders: Senders) -> None:
        """Note that somebody waits for these ranks."""
        if senders is not None:
            self._wanted.update(senders)

    def missing(self, senders: Senders) -> Iterator[int]:
        """Yield which of these ranks have not come yet."""
        ranks = self.expected if senders is None else senders
        return (rank for rank in ranks if rank not in self.stamps and rank in self.expected)

    def known_to(self, waiting: Stamp, senders: Senders, joiner: Joiner) -> Clock:
        """Return what a rank knows that has waited for these, and knew so much before."""
        learnt = self._clocks.get(senders)
        if learnt is None:
            ranks = self.stamps if senders is None else senders
            stamps = (self.stamps[rank] for rank in ranks if rank in self.stamps)
            learnt = self._clocks[senders] = joiner.meet(stamps)
        if senders is None and self.stamps[waiting.rank].known is waiting.known:
            return learnt  # all that it knows it has brought along
        return joiner.join(waiting.known, learnt)


class _Group:
    """The observed members of a process group, and its meetings that not all have come to."""

    __slots__ = ("expected", "is_whole", "open", "value")

    def __init__(self, value: ProcessGroup, world: RankSet) -> None:
        self.value = value
        self.expected = RankSet(set(value.ranks) & set(world))
        self.is_whole = len(self.expected) == len(set(value.ranks))
        self.open: dict[int, Meeting] = {}


class Meetings:
    """All meetings that somebody may still come to."""

    def __init__(self, world: RankSet) -> None:
        """Start with none; only the ranks of `world` are observed."""
        self._world = world
        self._numbers = count()
        self._by_id: dict[int, _Group] = {}
        self._by_key: dict[Hashable, _Group] = {}
        self._enough = 2 * _MOST_IDLE
        self._messages: dict[Hashable, Meeting] = {}
        self._turns: Turns[Hashable] = Turns(2, _MOST_UNMATCHED)
        self._scopes: Counter[Hashable] = Counter()
        self._creations: dict[Hashable, Meeting] = {}

    def collective(self, call: Collective, stamp: Stamp) -> Meeting:
        """Let a rank come to the meeting of its collective."""
        group = self._group(call.group)
        meeting = group.open.get(call.collective_seq_id)
        if meeting is None:
            number = next(self._numbers)
            meeting = Meeting(number, group.expected, is_whole=group.is_whole)
            group.open[call.collective_seq_id] = meeting
        meeting.stamps[call.rank] = stamp
        if len(meeting.stamps) == meeting.num_expected:
            del group.open[call.collective_seq_id]
        return meeting

    def message(self, call: Collective, peer: int, stamp: Stamp) -> Meeting | None:
        """Let a sender or receiver come to the meeting with its peer; None: that is forgotten."""
        is_send = call.signature.op == "send"
        ends = (call.rank, peer) if is_send else (peer, call.rank)
        lane = (group_key(call.group), *ends, _tag(call))
        turn = self._turns.next(lane, is_send)
        if turn is None:
            return None
        if len(self._messages) > _MOST_UNMATCHED:
            del self._messages[next(iter(self._messages))]
        meeting = self._messages.pop((lane, turn), None)
        if meeting is None:
            meeting = Meeting(next(self._numbers), RankSet(ends))
            self._messages[lane, turn] = meeting
        meeting.stamps[call.rank] = stamp
        return meeting

    def creation(self, call: GroupCreated, stamp: Stamp) -> Meeting:
        """Let a rank come to the creation of a group, which all of its scope make in one order."""
        scope = (call.scope, call.generation)
        turn = self._scopes[scope, call.rank]
        self._scopes[scope, call.rank] += 1
        meeting = self._creations.get((scope, turn))
        if meeting is None:
            expected = RankSet(set(call.scope) & set(self._world))
            meeting = self._creations[scope, turn] = Meeting(next(self._numbers), expected)
        meeting.stamps[call.rank] = stamp
        if len(meeting.stamps) == meeting.num_expected:
            del self._creations[scope, turn]
        return meeting

    def _group(self, value: ProcessGroup) -> _Group:
        group = self._by_id.get(id(value))
        if group is None or group.value is not value:
            self._forget_idle()
            group = self._by_key.setdefault(group_key(value), _Group(value, self._world))
            if group.value is value:
                self._by_id[id(value)] = group
        return group

    def _forget_idle(self) -> None:
        if len(self._by_key) < self._enough:
            return
        idle = [key for key, group in self._by_key.items() if not group.open]
        for key in idle[:-_MOST_IDLE]:
            self._by_id.pop(id(self._by_key.pop(key).value), None)
        self._enough = max(2 * _MOST_IDLE, 2 * len(self._by_key))


# Pair sends with receives by process group, source, destination and tag.

MessageAlignment = Alignment[Collective]
_Lane = tuple[GroupKey, int, int, int]


@dataclass(slots=True)
class _Queues:
    sends: deque[Collective] = field(default_factory=deque)
    receives: deque[Collective] = field(default_factory=deque)
    num_paired: int = 0

    @property
    def is_open(self) -> bool:
        """Whether something waits for its counterpart."""
        return bool(self.sends or self.receives)


class Messages(_OfWorld):
    """The sends and receives that have not met yet."""

    def __init__(self, world: RankSet) -> None:
        super().__init__(world)
        self._lanes: dict[_Lane, _Queues] = {}
        self._enough = 2 * _MOST_IDLE
        self._open_receives: dict[tuple[GroupKey, int, int], deque[Collective]] = {}

    def add(self, call: Collective) -> MessageAlignment | None:
        """Take in a send or receive; return the pair if it completes one that disagrees."""
        tag = _tag(call)
        group = group_key(call.group)
        if call.signature.op == "recv_any_source":
            self._add_open_receive(call, group, tag)
            return None
        peer = call.signature.peer
        if peer is None or peer not in self._world or call.rank not in self._world:
            return None
        is_send = call.signature.op == "send"
        source, destination = (call.rank, peer) if is_send else (peer, call.rank)
        if is_send and self._take_open_receive(group, destination, tag):
            return None
        lane = (group, source, destination, tag)
        self._forget_idle()
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

    def leave_out(self, rank: int) -> None:
        """Expect nothing of a rank, and forget what waits for it or is its own."""
        super().leave_out(rank)
        self._lanes = {lane: q for lane, q in self._lanes.items() if rank not in lane[1:3]}
        self._open_receives = {p: q for p, q in self._open_receives.items() if p[1] != rank}

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
        if not waiting:
            del self._open_receives[group, destination, tag]
        return True

    def _forget_idle(self) -> None:
        """Forget the oldest lanes of many in which all has met: tags may never come again."""
        if len(self._lanes) < self._enough:
            return
        idle = [lane for lane, queues in self._lanes.items() if not queues.is_open]
        for lane in idle[:-_MOST_IDLE]:
            del self._lanes[lane]
        self._enough = max(2 * _MOST_IDLE, 2 * len(self._lanes))

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


# Aligns the calls that create process groups.

GroupAlignment = Alignment[GroupCreated]
_Scope = tuple[tuple[int, ...], int]


class GroupCalls(_OfWorld):
    """The group-creating calls that not all ranks of their scope have made yet."""

    def __init__(self, world: RankSet) -> None:
        super().__init__(world)
        self._counts: Counter[tuple[int, _Scope]] = Counter()
        self._open: dict[tuple[_Scope, int], dict[int, GroupCreated]] = {}
        self._broken: set[_Scope] = set()

    def add(self, call: GroupCreated) -> GroupAlignment | None:
        """Take in one call; return the alignment if it completes one that the ranks disagree on."""
        is_over = call.done or call.api.startswith("destroy")
        if is_over or call.rank not in self._world:
            return None
        scope = (call.scope, call.generation)
        # Destroying is not done by all, so the calls are numbered here, without it.
        ordinal = self._counts[call.rank, scope]
        self._counts[call.rank, scope] += 1
        by_rank = self._open.setdefault((scope, ordinal), {})
        by_rank[call.rank] = call
        if len(by_rank) < len(self._observed(scope)):
            return None
        del self._open[scope, ordinal]
        alike = {(other.ranks, other.desc) for other in by_rank.values()}
        if len(alike) == 1 or scope in self._broken:
            return None
        if len({other.ranks for other in by_rank.values()}) > 1:
            # From here on the ranks' calls are paired wrongly: the rest would be consequences.
            self._broken.add(scope)
        return self._alignment(scope, ordinal, by_rank)

    def leave_out(self, rank: int) -> None:
        """Expect nothing of a rank, and forget the calls that only it had not made."""
        super().leave_out(rank)
        self._open = {
            (scope, ordinal): by_rank
            for (scope, ordinal), by_rank in self._open.items()
            if not self._observed(scope) <= by_rank.keys()
        }

    @property
    def is_broken(self) -> bool:
        """Whether ranks created different groups by the same call."""
        return bool(self._broken)

    def unmatched(self) -> Iterator[GroupAlignment]:
        """Yield for each scope the first call that not all of its ranks have made."""
        seen = set(self._broken)
        for (scope, ordinal), by_rank in sorted(self._open.items(), key=lambda item: item[0][1]):
            if scope not in seen:
                seen.add(scope)
                yield self._alignment(scope, ordinal, by_rank)

    def _observed(self, scope: _Scope) -> RankSet:
        return RankSet(set(scope[0]) & set(self._world))

    def _alignment(
        self, scope: _Scope, ordinal: int, by_rank: dict[int, GroupCreated]
    ) -> GroupAlignment:
        return Alignment(
            kind="group",
            key=(ordinal,),
            by_rank=dict(sorted(by_rank.items())),
            expected_ranks=self._observed(scope),
        )
