"""Match the calls of several ranks that belong together, and keep what each rank knew then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import count

from distdiag.engine.clocks import Clock, Joiner, Stamp
from distdiag.engine.collectives import group_key
from distdiag.engine.gate import Gate
from distdiag.engine.sync_edges import Senders
from distdiag.event import Collective, GroupCreated, ProcessGroup
from distdiag.ranks import RankSet


class Meeting(Gate):
    """One collective, one message or one creation of a group.

    `stamps` holds what each rank that has come knew then, `expected` the observed ranks that come;
    `is_whole` says that there are no others.
    """

    __slots__ = ("_clocks", "_wanted", "expected", "is_whole", "num_expected", "number", "stamps")

    def __init__(self, number: int, expected: RankSet, *, is_whole: bool = True) -> None:
        """Wait for these ranks."""
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
        self._messages: dict[Hashable, Meeting] = {}
        self._turns: Counter[Hashable] = Counter()
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

    def message(self, call: Collective, peer: int, stamp: Stamp) -> Meeting:
        """Let a sender or receiver come to the meeting with its peer."""
        is_send = call.signature.op == "send"
        # NCCL has no tags: it pairs by order alone.
        tag = 0 if "nccl" in call.group.backend else call.signature.tag or 0
        ends = (call.rank, peer) if is_send else (peer, call.rank)
        lane = (id(self._group(call.group)), *ends, tag)
        turn = self._turns[lane, is_send]
        self._turns[lane, is_send] += 1
        meeting = self._messages.pop((lane, turn), None)
        if meeting is None:
            meeting = Meeting(next(self._numbers), RankSet(ends))
            self._messages[lane, turn] = meeting
        meeting.stamps[call.rank] = stamp
        return meeting

    def creation(self, call: GroupCreated, stamp: Stamp) -> Meeting:
        """Let a rank come to the creation of a group, which all of its scope make in one order."""
        scope = (call.scope, call.generation)
        turn = self._turns[scope, call.rank]
        self._turns[scope, call.rank] += 1
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
            group = self._by_key.setdefault(group_key(value), _Group(value, self._world))
            if group.value is value:
                self._by_id[id(value)] = group
        return group
