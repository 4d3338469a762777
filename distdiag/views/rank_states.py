"""What is known of one rank at one moment."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import (
    BufferChanged,
    Collective,
    CollectiveState,
    GroupCreated,
    GroupProgress,
)
from distdiag.events.files import FileAccess, StoreAsked, StoreCall
from distdiag.events.lifecycle import (
    ChildEnded,
    Exited,
    Finished,
    NodeLost,
    Raised,
    RankStarted,
    Signalled,
)
from distdiag.events.stacks import Observed, Stacks
from distdiag.views.base import View

END_SIGNALS: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that no fault of a program sends: a launcher, a scheduler or a person did."""

_SHELL_OFFSET: Final = 128
"""What shells, and programs that handle a signal, add to its number to make an exit status."""


def was_asked_to_end(status: int | None) -> bool:
    """Say whether an exit status (minus the number, for a signal) tells of a signal to end."""
    if status is None:
        return False
    return (-status if status < 0 else status - _SHELL_OFFSET) in END_SIGNALS


class RankStatus(StrEnum):
    """What became of a rank so far."""

    SILENT = "silent"  # no event was ever read
    RUNNING = "running"
    FINISHED = "finished"  # the script came to its end, with whatever exit status
    RAISED = "raised"  # an exception was not caught
    DIED = "died"  # the process is gone and had neither finished nor raised


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
    the run has ended, nothing more will be heard of the rank. `lost`: its node fell silent. `label`
    is the name of a process whose rank is not known: then `rank` only numbers it.
    `is_reported_only`: the rank recorded nothing itself, so logs and launchers tell what is known,
    and there may have been more ranks.
    `progress` is how far it is in a process group, by the group's name, where dumps or messages of
    the group say so. `is_idle_assumed`: nobody knows `idle_s`, only that the rank stood still.
    `asked` is what its main thread waits for in the job's store, as far as its records tell;
    `published` are the last keys that it set there; `made` the last files that it wrote or put in
    place; `dead_children` those of its processes that ended badly. `torch` is its version, where
    known.
    """

    rank: int
    status: RankStatus = RankStatus.SILENT
    phase: Phase = Phase.STARTING
    step: int = 0
    num_batches: int = 0
    num_backwards: int = 0
    idle_s: float = 0.0
    is_working: bool = False
    help: Help | None = None
    gil_held: bool = False
    incomplete: str = ""
    label: str = ""
    is_reported_only: bool = False
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
    torch: str = ""
    observed: Mapping[str, Observed] = field(default_factory=dict)
    progress: Mapping[str, GroupProgress] = field(default_factory=dict)
    is_idle_assumed: bool = False
    asked: StoreAsked | None = None
    published: tuple[StoreCall, ...] = ()
    made: tuple[FileAccess, ...] = ()
    dead_children: tuple[ChildEnded, ...] = ()

    @property
    def knows_step(self) -> bool:
        """Whether its records count steps: logs and dumps of others do not."""
        is_recorded = self.phase not in (Phase.STARTING, Phase.SCRIPT)
        return self.started is not None or self.step > 0 or is_recorded

    @property
    def has_failed(self) -> bool:
        """It raised, died, or left with a status that says failure."""
        is_bad = self.status in (RankStatus.RAISED, RankStatus.DIED)
        return is_bad or (self.status is RankStatus.FINISHED and bool(self.exit_status))

    def has_reached(self, call: Collective) -> bool:
        """Say whether it made this call of a group, or a later one."""
        progress = self.progress.get(call.group.name)
        enqueued = progress.enqueued if progress is not None else None
        if enqueued is not None and enqueued >= call.collective_seq_id:
            return True
        return any(
            other.group.name == call.group.name
            and other.group.generation == call.group.generation
            and other.collective_seq_id >= call.collective_seq_id
            for other in self.recent
        )

    def is_known_in(self, call: Collective) -> bool:
        """Say whether the group itself told that this call of the rank has not ended."""
        progress = self.progress.get(call.group.name)
        completed = progress.completed if progress is not None else None
        return completed is not None and completed < call.collective_seq_id

    def has_begun(self, call: Collective) -> bool | None:
        """Say whether its GPU has begun this call of a group; None where nobody knows."""
        progress = self.progress.get(call.group.name)
        started = progress.started if progress is not None else None
        return None if started is None else started >= call.collective_seq_id

    @property
    def is_in_unrecorded_call(self) -> bool:
        """Whether some group says that the rank is in one of its calls, and no record which."""
        return any(
            p.enqueued is not None and p.completed is not None and p.enqueued > p.completed
            for p in self.progress.values()
        )

    @property
    def oom_kills(self) -> int:
        """So many processes had the kernel ended for want of memory when this rank was killed."""
        return self.exited.oom_kills if self.exited is not None else 0


# What a rank did last, in one sentence.


def last_act(state: RankState) -> str:
    """Say in one sentence what a rank did last.

    Example: ``all_reduce #12 in default_pg at train.py:41 (issued), step 3, phase backward``.
    """
    if state.raised:
        place = _place(next((f for f in state.raised.frames if f.user), None))
        message = " ".join(state.raised.message.split())[:200]
        step = f" in step {state.step}" if state.knows_step else ""
        return f"raised {state.raised.type}{place}{step}: {message}"
    if state.status is RankStatus.SILENT:
        threads = state.stacks.threads if state.stacks is not None else ()
        stack = threads[0].frames if threads else ()
        inner = next((frame for frame in stack if frame.user), stack[0] if stack else None)
        return f"seen{_place(inner)} in {inner.function}" if inner is not None else ""
    where = f"step {state.step}, phase {state.phase}" if state.knows_step else ""
    call = state.last_call
    if call is not None:
        number = f" #{call.collective_seq_id}" if call.collective_seq_id >= 0 else ""
        place = _place(call.site.location)
        doing = f"{call.signature.op}{number} in {call.group.label}{place}"
        where = f"{doing} ({state.last_call_state}){', ' if where else ''}{where}"
    if state.status is RankStatus.FINISHED:
        before = f"; before that {where}" if where else ""
        return f"finished with exit status {state.exit_status}{before}"
    return where


def _place(frame: Frame | None) -> str:
    return f" at {frame.file}:{frame.line}" if frame else ""


States = Mapping[int, RankState]
"""What is known of all ranks, by rank."""


@dataclass(frozen=True, slots=True)
class JobView(View):
    """The job as a whole: when it stands still, when a rank left badly, and at the end.

    `is_unexplained`: the run is over, ranks have failed, and no check has found why.
    """

    is_of_one_rank: ClassVar[bool] = True

    states: States
    is_unexplained: bool = False


@dataclass(frozen=True, slots=True)
class StackView(View):
    """The same where stacks of ranks are known: what they tell by themselves."""

    is_of_one_rank: ClassVar[bool] = True

    states: States


@dataclass(frozen=True, slots=True)
class WorkView(View):
    """What became of an asynchronous call of one rank, and the last calls of that rank."""

    is_of_one_rank: ClassVar[bool] = True

    event: Collective | CollectiveState | BufferChanged
    recent: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchView(View):
    """One rank tells how the job was launched; `states` is what is known of all ranks then."""

    is_of_one_rank: ClassVar[bool] = True

    event: RankStarted | GroupCreated
    states: States
