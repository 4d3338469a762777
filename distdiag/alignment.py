"""Events that belong together across ranks, and what each rank was doing meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, Literal, TypeVar

from distdiag.event import (
    CallSite,
    Collective,
    Event,
    Exited,
    FileAccess,
    FileClosed,
    Finished,
    GroupCreated,
    NodeLost,
    Observed,
    Phase,
    Raised,
    RankStarted,
    Signalled,
    Stacks,
)
from distdiag.ranks import RankSet

E = TypeVar("E", bound=Event)

Kind = Literal[
    "collective", "message", "group", "test", "optimizer", "save", "load", "data", "random", "step"
]


TOLD_TO_END: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that no fault of a program sends: a launcher, a scheduler or a person did."""
_SHELL_OFFSET: Final = 128
"""What shells, and programs that handle a signal, add to its number to make an exit status."""


def says_told_to_end(status: int | None) -> bool:
    """Say whether an exit status (minus the number, for a signal) tells of a signal to end."""
    if status is None:
        return False
    return (-status if status < 0 else status - _SHELL_OFFSET) in TOLD_TO_END


class Fate(StrEnum):
    """What became of a rank so far."""

    SILENT = "silent"  # no event was ever read
    RUNNING = "running"
    FINISHED = "finished"  # the script came to its end, with whatever exit status
    RAISED = "raised"  # an exception was not caught
    DIED = "died"  # the process is gone and had neither finished nor raised


class Trigger(StrEnum):
    """Why an incomplete alignment is shown to the checks now."""

    LEFT = "left"  # a missing rank finished, raised or died: it cannot come any more
    CYCLE = "cycle"  # the missing ranks wait, directly or not, for the ranks that are here
    STALLED = "stalled"  # nothing moved for the hang threshold
    ENDED = "ended"  # the run is over


@dataclass(frozen=True, slots=True)
class Help:
    """What is done for a rank that stands still, in the last `seconds`.

    Its `num_children` descendants used `children_cpu_s` seconds of the processor, and it and they
    read and wrote `io_bytes`.
    """

    seconds: float
    children_cpu_s: float = 0.0
    num_children: int = 0
    io_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of one rank at one moment.

    `recent` are its last calls, oldest first; `site_counts` says how often each call site was
    passed (a site counts once for each call). `waiting` are its calls that wait for another rank,
    oldest first. `idle_s` is the time in seconds without any progress (event, batch or backward);
    `is_working` says that it used the processor in that time without waiting for anybody;
    `help` is there if it is in no call and its child processes work, or it reads or writes;
    `gil_held` that its own background thread no longer runs. `incomplete` is the reason why its
    events cannot be relied upon to be all (a probe was disabled, a file was damaged), or ``""``.
    `left_ns` is when it finished, raised or was seen dead (0: it is still here): the smallest one
    among those that left badly is the first cause. `left_hang`: its process went after the job had
    been declared hung, so that somebody or something ended it for that. `observed` holds the last
    word of each source that looks at the rank from outside, by the name of the source.
    `exit_status` is minus the number of the signal that ended the process, if one did. `is_over`:
    the run has ended, nothing more will be heard of the rank. `lost`: its node fell silent.
    """

    rank: int
    fate: Fate = Fate.SILENT
    phase: Phase = Phase.STARTING
    step: int = 0
    num_batches: int = 0
    num_backwards: int = 0
    idle_s: float = 0.0
    is_working: bool = False
    help: Help | None = None
    gil_held: bool = False
    incomplete: str = ""
    left_ns: int = 0
    left_hang: bool = False
    started: RankStarted | None = None
    raised: Raised | None = None
    finished: Finished | None = None
    exited: Exited | None = None
    exit_status: int | None = None
    is_over: bool = False
    lost: NodeLost | None = None
    signalled: Signalled | None = None
    last_call: Collective | None = None
    last_call_state: str = ""
    recent: tuple[Collective, ...] = ()
    waiting: tuple[Collective, ...] = ()
    site_counts: Mapping[CallSite, int] = field(default_factory=dict)
    stacks: Stacks | None = None
    observed: Mapping[str, Observed] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """It raised, died, or left with a status that says failure."""
        is_bad = self.fate in (Fate.RAISED, Fate.DIED)
        return is_bad or (self.fate is Fate.FINISHED and bool(self.exit_status))

    @property
    def oom_kills(self) -> int:
        """So many processes had the kernel ended for want of memory when this rank was killed."""
        return self.exited.oom_kills if self.exited is not None else 0


@dataclass(frozen=True, slots=True)
class Alignment(Generic[E]):
    """The same moment of training as each rank saw it.

    `kind` is ``collective`` (key: group label, collective_seq_id), ``message`` (a send and the
    receive that should match it, key: group label, source, destination, tag, index), ``group``
    (a call that creates process groups, key: its ordinal), ``test`` (a path whose existence all
    ranks tested at one place of the program, key: path, index), ``optimizer`` (an optimizer that is
    about to step, key: optimizer, step), ``save`` (parts of sharded parameters that were saved,
    key: their names) or ``load`` (what became of a checkpoint, key: kind of event, …). `trigger` is
    None when all expected ranks are here. `parted` is the earlier point of the same group from
    which on the ranks' call sites have differed without meeting again, if there is one: the
    probable origin.
    """

    kind: Kind
    key: tuple[str | int, ...]
    by_rank: Mapping[int, E]
    expected_ranks: RankSet
    states: Mapping[int, RankState] = field(default_factory=dict)
    trigger: Trigger | None = None
    parted: Alignment[E] | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes two views the same moment, seen again."""
        return (self.kind, self.key, self.expected_ranks)

    @property
    def missing_ranks(self) -> RankSet:
        """Ranks that should have an event here and have none."""
        return RankSet(self.expected_ranks - self.by_rank.keys())

    @property
    def present_ranks(self) -> RankSet:
        """Ranks that have an event here."""
        return RankSet(self.by_rank)

    @property
    def any_event(self) -> E:
        """The event of the lowest rank that has one."""
        return self.by_rank[min(self.by_rank)]


class Conflict(StrEnum):
    """What can go wrong between two accesses that nothing orders."""

    READ_OF_WRITE = "read-of-write"  # a file is read while another rank writes it
    TWO_WRITES = "two-writes"  # two ranks write, or replace, one file
    USE_OF_REMOVED = "use-of-removed"  # removed or renamed away while another rank uses it
    LIST_OF_CHANGED = "list-of-changed"  # a folder is listed while another rank changes it


SyncPoint = Collective | GroupCreated


@dataclass(frozen=True, slots=True)
class Access:
    """One access of a rank, and what this rank had waited for before it.

    `closed` is its end, None while it is open. `last_sync` is the last call before it in which the
    rank waited for others. `unwaited` are asynchronous collectives that it had issued before and
    whose end it has not observed. `is_before_init`: the rank had not yet created its default
    process group. `is_followed`: a `LIST` after which the rank used an entry that another rank had
    changed.
    """

    event: FileAccess
    closed: FileClosed | None = None
    last_sync: SyncPoint | None = None
    unwaited: tuple[Collective, ...] = ()
    is_before_init: bool = False
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Race:
    """Accesses to the same files, from the same places of the program, that nothing orders.

    `changes` are those of the ranks that write, rename or remove, `uses` those of the ranks that
    need it otherwise, one of each rank; of two writes both hold all writers. `paths` are all files
    concerned, in the order in which they were met. `common_sync` is the last point before that a
    changing and a using rank have in common. `has_struck`: by the clock a use lies within a change.
    `raised` are the exceptions by which ranks ended in one of these accesses.
    """

    conflict: Conflict
    changes: Mapping[int, Access]
    uses: Mapping[int, Access]
    paths: tuple[str, ...]
    common_sync: SyncPoint | None = None
    has_struck: bool = False
    raised: Mapping[int, Raised] = field(default_factory=dict)
    states: Mapping[int, RankState] = field(default_factory=dict)

    @property
    def ranks(self) -> RankSet:
        """All ranks concerned."""
        return RankSet([*self.changes, *self.uses])


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A rank ended because a file was not there, and no rank of its node had ever written it.

    `namesakes` are the last writes of files with the same name elsewhere, by rank.
    """

    rank: int
    path: str
    raised: Raised
    namesakes: Mapping[int, FileAccess]
