"""What the messages of process groups tell together, as the events of the ranks.

A message tells of one call or of one counter of one rank. The messages of all ranks, from however
many files, are put together here: who is a member of which group, which call each one is in, and
how far each has come. They become the events that flight recorders become, as far as they go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec

from distdiag.dumps.reading import RankDump
from distdiag.events.base import CallSite, Event, Frame
from distdiag.events.collectives import (
    UNNUMBERED,
    Collective,
    GroupProgress,
    ProcessGroup,
    Signature,
    Sizes,
)
from distdiag.events.ranks import RankSet

# How messages name operations: ``c10d::opTypeToString``.

_OPS: Final = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "_ALLREDUCE_SPARSE": "all_reduce",
    "BROADCAST": "broadcast",
    "_BROADCAST_OOP": "broadcast",
    "REDUCE": "reduce",
    "_REDUCE_OOP": "reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_into_tensor_coalesced",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather_into_tensor_coalesced",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter_tensor_coalesced",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "BARRIER": "barrier",
    "SEND": "send",
    "RECV": "recv",
    "RECVANYSOURCE": "recv_any_source",
    "COALESCED": "coalesced",
}
MESSAGES: Final = frozenset({"send", "recv", "recv_any_source"})
"""Their numbers count something else, and who the peer is is not told."""
_SYMMETRIC: Final = (
    frozenset(_OPS.values())
    - MESSAGES
    - {*("broadcast", "reduce", "gather", "scatter", "coalesced")}
)
"""One of these ends on no rank before all have come to it."""
_EQUAL: Final = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}
)
"""All ranks hand over equally many elements. The sizes of other operations are not compared."""


def op_of(name: str) -> str:
    """Return the name of the public function for ``ALLREDUCE``; others stay, in small letters."""
    return _OPS.get(name, name.lower())


def sizes_of(op: str, numel_in: int, numel_out: int) -> tuple[Sizes, Sizes]:
    """Return input and output sizes of a call of which only numbers of elements are told.

    A list of tensors was told as their sum; the tensors of a list are alike in these backends.
    """
    if op in _EQUAL:
        return ((numel_in,),), ((numel_out,),)
    if op == "all_gather" and numel_in > 0 and numel_out % numel_in == 0:
        return ((numel_in,),), ((numel_in,),) * (numel_out // numel_in)
    if op == "reduce_scatter" and numel_out > 0 and numel_in % numel_out == 0:
        return ((numel_out,),) * (numel_in // numel_out), ((numel_out,),)
    return (), ()


# ---


class GroupName(msgspec.Struct, frozen=True, array_like=True):
    """How a message names a process group: by a number or hash, and a description.

    ``("", "")`` is a message that names none, as before torch 2.2.
    """

    name: str = ""
    desc: str = ""

    @property
    def is_default(self) -> bool:
        """Whether it is the group of all ranks, or none was named."""
        return self.desc == "default_pg" or (
            self.name in ("", "0") and self.desc in ("", "undefined")
        )


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one message says of one rank of a group.

    `place` is the rank's place in the group, `own_place` that of whom the message is from; -1: not
    told. `op` is empty where no call is told; `seq` is its number in the group, or None. It has not
    ended. The rank has called `enqueued` collectives, `completed` have ended; -1: not told.
    `is_whole`: all ranks of the group have come to the call. `ran_s` is how long it had lasted.
    """

    group: GroupName
    backend: str = "nccl"
    place: int = -1
    own_place: int = -1
    op: str = ""
    seq: int | None = None
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    dtypes: tuple[str, ...] = ()
    enqueued: int = -1
    completed: int = -1
    is_whole: bool = False
    ran_s: float = 0.0
    frames: tuple[Frame, ...] = ()


class ReportDump(RankDump, frozen=True, kw_only=True):
    """What the messages of one file say that came from one rank; `num_ranks` wrote to the file."""

    reports: tuple[GroupReport, ...]
    num_ranks: int = 0

    @property
    def last_rank(self) -> int:
        """The highest rank that it knows or mentions: places in the default group are ranks."""
        places = (r.place for r in self.reports if r.group.is_default)
        return max([super().last_rank, self.num_ranks - 1, *places])


_Key = tuple[str, str]


class _Member:
    """What is known of one rank in one group."""

    def __init__(self) -> None:
        self.calls: dict[int, GroupReport] = {}
        self.enqueued = -1
        self.completed = -1
        self.whole = -1

    def add(self, report: GroupReport) -> None:
        if report.op:
            number = UNNUMBERED if report.seq is None else report.seq
            known = self.calls.get(number)
            if known is None or _num_facts(known) < _num_facts(report):
                self.calls[number] = report
            if report.is_whole:
                self.whole = max(self.whole, number)
        self.enqueued = max(self.enqueued, report.enqueued)
        self.completed = max(self.completed, report.completed)

    @property
    def first(self) -> int | None:
        """The number of the call that it is in, if that is known."""
        return min(self.calls, default=None)

    @property
    def is_consistent(self) -> bool:
        """Whether the counters fit the call; where they count otherwise, they tell nothing."""
        first = self.first
        if first is None or first == UNNUMBERED:
            return self.enqueued < 0 or self.completed <= self.enqueued
        return (self.completed < 0 or self.completed < first) and (
            self.enqueued < 0 or self.enqueued >= first
        )


class _Group:
    """What is known of one process group: its members by place, and what each of them said."""

    def __init__(self, name: GroupName, backend: str) -> None:
        self.name = name
        self.backend = backend
        self.ranks: dict[int, int] = {}
        self.members: dict[int, _Member] = {}
        self.is_unclear = False
        self.has_messages = False

    @property
    def is_several(self) -> bool:
        """Whether these are the messages of several groups, as the numbers of the calls show.

        A rank that is in call 41 has ended call 40, to which all ranks of the group have come: none
        of them can still be in call 39, unless only its root waits for the others there.
        """
        firsts = {m.first: m for m in self.members.values() if m.first not in (None, UNNUMBERED)}
        numbers = sorted(number for number in firsts if number is not None)
        if len(numbers) < 2 or numbers[-1] - numbers[0] <= 1:
            return False
        return firsts[numbers[0]].calls[numbers[0]].op in _SYMMETRIC

    def join(self, rank: int, place: int) -> None:
        """Take note of whose place it is; two ranks at one place are of two groups of one name."""
        if place < 0:
            return
        if self.name.is_default:
            self.is_unclear |= place != rank
        self.is_unclear |= self.ranks.setdefault(place, rank) != rank

    @property
    def heard(self) -> tuple[int, ...]:
        """The ranks whose calls or counters can be compared."""
        if self.is_unclear or self.is_several:
            return ()
        return tuple(r for r, m in self.members.items() if m.calls or not self.has_messages)

    def add(self, rank: int, report: GroupReport) -> None:
        self.has_messages |= report.op in MESSAGES
        if report.op not in MESSAGES:
            self.members.setdefault(rank, _Member()).add(report)


class ReportedRun:
    """The messages of all ranks of a job."""

    def __init__(
        self,
        dumps: Iterable[ReportDump],
        ranks: Iterable[int] = (),
        labelled: Collection[int] = (),
    ) -> None:
        """Take the messages; `ranks` are all of which something is known.

        Those in `labelled` only number processes whose ranks are not known.
        """
        self._groups: dict[_Key, _Group] = {}
        dumps = [dump for dump in dumps if dump.rank is not None]
        known = {dump.rank for dump in dumps if dump.rank is not None} | set(ranks)
        self._num_ranks = max([0, *(dump.num_ranks for dump in dumps)])
        self._named = _named_calls(report for dump in dumps for report in dump.reports)
        for dump in dumps:
            for report in dump.reports:
                assert dump.rank is not None
                self._group(report).join(dump.rank, report.own_place)
        for dump in dumps:
            for report in dump.reports:
                assert dump.rank is not None
                group = self._group(report)
                rank = self._whose(group, dump.rank, report)
                if rank is not None:
                    group.add(rank, report)
                    known.add(rank)
        self._num_ranks = max(self._num_ranks, *(r + 1 for r in known - set(labelled)), 0)
        self._made = {key: self._process_group(group) for key, group in self._groups.items()}
        for key, group in self._groups.items():
            if self._met(group) >= 0:  # who is not named in the message has come, too
                for rank in self._made[key].ranks:
                    group.members.setdefault(rank, _Member())

    def _group(self, report: GroupReport) -> _Group:
        # A message that names no group is about the call of that number that another names a group
        # for (torch 2.2 to 2.5 do so in the second of two lines); else about the default group.
        name = report.group
        if name == GroupName() and report.seq is not None:
            name = self._named.get(report.seq, name)
        key = ("0", "default_pg") if name.is_default else (name.name, name.desc)
        return self._groups.setdefault(key, _Group(name, report.backend))

    @staticmethod
    def _whose(group: _Group, rank: int, report: GroupReport) -> int | None:
        if report.place < 0 or report.place == report.own_place:
            return rank
        return report.place if group.name.is_default else group.ranks.get(report.place)

    def _process_group(self, group: _Group) -> ProcessGroup:
        if group.name.is_default:
            ranks = tuple(range(self._num_ranks))
            return ProcessGroup("0", "default_pg", ranks, group.backend)
        placed = [group.ranks[place] for place in sorted(group.ranks)]
        others = sorted(group.members.keys() - set(placed))
        return ProcessGroup(group.name.name, group.name.desc, (*placed, *others), group.backend)

    @property
    def ranks(self) -> RankSet:
        """The ranks of which a message told something."""
        return RankSet(rank for group in self._groups.values() for rank in group.heard)

    @property
    def members(self) -> RankSet:
        """The ranks that the job has, as far as messages name them."""
        return RankSet({*self.ranks, *range(self._num_ranks)} if self._groups else ())

    @property
    def lasted_s(self) -> float:
        """How long the longest call had lasted that has not ended, in seconds; 0 is unknown."""
        calls = (
            call.ran_s
            for group in self._groups.values()
            for member in group.members.values()
            for call in member.calls.values()
        )
        return max(calls, default=0.0)

    def events(self, rank: int, first_seq: int = 0) -> Iterator[Event]:
        """Yield in which calls a rank is, and how far it is in each group."""
        seq = first_seq
        for key, group in self._groups.items():
            member = group.members.get(rank)
            if member is None or rank not in group.heard:
                continue
            made = self._made[key]
            counts = member.is_consistent and not group.has_messages
            first = member.first
            completed = member.completed if counts and member.completed >= 0 else None
            if first is not None:
                completed = first - 1
            if completed is not None:
                yield _progress(rank, made, completed=completed)
            for number, report in sorted(member.calls.items()):
                yield _call(rank, seq, made, number, report)
                seq += 1
            enqueued = max(
                member.enqueued if counts else -1,
                max((n for n in member.calls if n != UNNUMBERED), default=-1),
                self._met(group),
            )
            if enqueued >= 0:
                yield _progress(rank, made, completed=completed, enqueued=enqueued)

    @staticmethod
    def _met(group: _Group) -> int:
        """Return the number of the last call to which all members are known to have come."""
        return max((member.whole for member in group.members.values()), default=-1)


def _named_calls(reports: Iterable[GroupReport]) -> dict[int, GroupName]:
    """Return whose calls the numbers are for which messages name one group only."""
    found: dict[int, set[GroupName]] = {}
    for report in reports:
        if report.group != GroupName() and report.seq is not None:
            found.setdefault(report.seq, set()).add(report.group)
    return {seq: names.pop() for seq, names in found.items() if len(names) == 1}


def _progress(
    rank: int, group: ProcessGroup, *, completed: int | None, enqueued: int | None = None
) -> GroupProgress:
    return GroupProgress(
        rank=rank, seq=-1, time_ns=0, group=group, completed=completed, enqueued=enqueued
    )


def _call(rank: int, seq: int, group: ProcessGroup, number: int, report: GroupReport) -> Collective:
    return Collective(
        rank=rank,
        seq=seq,
        time_ns=0,
        group=group,
        collective_seq_id=number,
        signature=Signature(report.op, report.input_sizes, report.output_sizes, report.dtypes),
        site=CallSite(report.frames),
    )


def _num_facts(report: GroupReport) -> int:
    return bool(report.input_sizes) + bool(report.dtypes) + 2 * bool(report.frames)
