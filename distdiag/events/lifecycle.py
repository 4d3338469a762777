"""What is observed of a rank from its start to its end: steps, exceptions, signals, exit."""

from typing import Literal

from distdiag.events.base import CallSite, Event, Frame, Phase


class RankStarted(Event, frozen=True, kw_only=True):
    """The agent of a rank began to observe. `unix_ns` is the wall clock at `time_ns`."""

    local_rank: int
    world_size: int
    hostname: str
    pid: int
    python: str
    command: tuple[str, ...]
    unix_ns: int
    attempt: int = 0


class TorchLoaded(Event, frozen=True, kw_only=True):
    """torch was imported. `tap` is the way collectives are observed."""

    torch: str
    tap: Literal["hooks", "dispatcher", "flight_recorder", "none"]


class ChildEnded(Event, frozen=True, kw_only=True):
    """A process that the rank started by `multiprocessing` has ended badly, and it knows that.

    `status` is its exit status, or minus the number of the signal that ended it.
    """

    pid: int
    status: int


class StepEnd(Event, frozen=True, kw_only=True):
    """The end of one optimizer step; `step` is the number of the step that ended."""

    duration_s: float
    num_backwards: int = 0


class SteppedAlone(Event, frozen=True, kw_only=True):
    """An optimizer stepped for the first time, and nothing connects this rank with others.

    `num_launched` is the number of ranks by the environment. `library`: there may be a process
    group, but this library has set itself up for one process. `others` are imported packages by
    which ranks may exchange gradients without a process group.
    """

    num_launched: int
    library: str
    others: tuple[str, ...]
    site: CallSite


class Raised(Event, frozen=True, kw_only=True):
    """An exception that nobody caught. `frames` innermost first.

    `unhooked` is a method of a model that FSDP2 keeps (``Model.generate``) in which a module met
    its own parameters as shards: they are gathered in the forward pass, and this was none.
    """

    type: str
    message: str
    frames: tuple[Frame, ...]
    traceback: str
    thread: str = "MainThread"
    unhooked: str = ""


class BrokenPass(Event, frozen=True, kw_only=True):
    """An exception ended a pass of the training; the program may have caught it.

    `what` is ``forward pass``, ``backward pass`` or ``fetch of a batch``, called at `site`.
    `frames` are where the exception was raised, innermost first. Of a forward pass nothing is known
    of the exception, and the event comes when the next one begins.
    """

    what: str
    type: str
    message: str
    frames: tuple[Frame, ...]
    site: CallSite


class Signalled(Event, frozen=True, kw_only=True):
    """A Python signal handler of the script ran."""

    signal: int
    frames: tuple[Frame, ...] = ()


class Finished(Event, frozen=True, kw_only=True):
    """The script ended (its exit handlers included); `exit_status` is what it asked for.

    Where that is a failure, `frames` (innermost first) are where it left, and `message` is what it
    gave as the reason, as in ``sys.exit("no data")``.
    """

    exit_status: int
    frames: tuple[Frame, ...] = ()
    message: str = ""


class ProbeDisabled(Event, frozen=True, kw_only=True):
    """A probe failed or could not observe and was switched off."""

    probe: str
    reason: str
    traceback: str = ""


class EventsLost(Event, frozen=True, kw_only=True):
    """Between the event before and the one after this, `num_segments` segments are not kept.

    Who reads the event file of a rank says it, such as of a run that is longer than what is kept.
    """

    num_segments: int


class Unobserved(Event, frozen=True, kw_only=True):
    """A probe works, but something is not seen: it lacks `what`, an attribute or an object."""

    probe: str
    what: str
    reason: str


class Heartbeat(Event, frozen=True, kw_only=True):
    """What a rank is doing now, read by the monitor from its status page; no rank writes it.

    `beat_ns` is the last time the rank's own background thread ran: it stands still when the GIL is
    held. `cpu_s` is the processor time that the process has used. While the rank stands still,
    `children_cpu_s` is that of its `num_children` descendants and of those that have ended, and
    `io_bytes` what all of them have read and written; they are None where nobody has looked.
    """

    phase: Phase
    beat_ns: int
    num_batches: int = 0
    num_backwards: int = 0
    cpu_s: float = 0.0
    children_cpu_s: float | None = None
    num_children: int = 0
    io_bytes: int = 0


Cause = Literal["", "out-of-memory", "time-limit", "preempted", "node-failed", "cancelled"]
"""Why somebody ended a process, where a scheduler, a container or the kernel has said it."""


class Exited(Event, frozen=True, kw_only=True):
    """The monitor saw the process of a rank gone, after all its events were read.

    It ended between `time_ns`, when it was last known to live, and `gone_ns`, when the monitor did
    not find it any more (0: at `time_ns`).
    `status` is its exit status, or minus the number of the signal that ended it, or None where
    nobody could see it. `oom_kills` counts the processes that the kernel's out-of-memory killer has
    ended around this one since the rank began. `cause` is what a scheduler or the
    kernel said of it.
    """

    reason: str = ""
    status: int | None = None
    oom_kills: int = 0
    cause: Cause = ""
    gone_ns: int = 0


class ProcessNamed(Event, frozen=True, kw_only=True):
    """Nothing tells which rank a process is: `rank` only numbers it, `label` names it.

    Labels are what logs and dumps have: ``TrainWorker pid=31, ip=10.0.0.1``, ``worker-2``, the name
    of a file.
    """

    label: str


class Monitored(Event, frozen=True, kw_only=True):
    """What the monitor of a node did beside its ranks, of which `rank` is the first.

    ``looked``: it let time pass until `time_ns`, in the engine that compares the ranks.
    ``aborted``: it killed the ranks, since they hang and the user wants that.
    ``ended``: all that it waited for were over, and it drew its conclusions.
    """

    act: Literal["looked", "aborted", "ended"]


class NodeLost(Event, frozen=True, kw_only=True):
    """The node of a rank fell silent without a good-bye; `time_ns` is when it was last heard of.

    It is said for each of its ranks that is not known to have ended.
    """

    hostname: str
    silent_s: float
