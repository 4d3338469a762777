"""What probes observe: one frozen record for each kind of event.

Values that repeat (process groups, signatures, call sites) are objects of their own, so that a
file holds each of them once and a comparison of two ranks is mostly a comparison of identities.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

Sizes = tuple[tuple[int, ...], ...]


class Phase(StrEnum):
    """What a rank is busy with, as far as its heartbeat tells."""

    STARTING = "starting"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    DATALOADER = "dataloader"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    SCRIPT = "script"
    FINISHED = "finished"


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a Python stack. `user` is false inside torch, known frameworks and distdiag."""

    file: str
    line: int
    function: str
    user: bool = True


class CallSite(msgspec.Struct, frozen=True, array_like=True):
    """Where a call was made: the Python stack, innermost frame first.

    `module` is the FQN of the sharded module on whose behalf the call was made, where known.
    """

    frames: tuple[Frame, ...]
    module: str | None = None

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames of the user's own code, innermost first."""
        return tuple(frame for frame in self.frames if frame.user)

    @property
    def location(self) -> Frame | None:
        """The innermost frame of the user's own code, or None if the stack shows none."""
        return next((frame for frame in self.frames if frame.user), None)


class ProcessGroup(msgspec.Struct, frozen=True, array_like=True):
    """A process group as one rank knows it.

    `ranks` are global ranks in group order. `generation` counts the initialisations of the default
    group, since names are used again after `destroy_process_group`.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    generation: int = 0

    @property
    def label(self) -> str:
        """The group's description if it has one, else its name."""
        return self.desc if self.desc and self.desc != "undefined" else self.name


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """What a collective or point-to-point call asks for.

    `op` is the name of the public torch function (``all_gather_into_tensor``). `root` and `peer`
    are global ranks. `input_splits` and `output_splits` count rows of dim 0. `reduce_op` is None
    where the call did not pass through Python (DDP's reducer).
    """

    op: str
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    dtypes: tuple[str, ...] = ()
    reduce_op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, tag_field="kind"):
    """Something one rank saw at one moment.

    `seq` numbers the events of one rank from 0, `time_ns` is its monotonic clock, `step` counts
    the optimizer steps that it finished.
    """

    rank: int
    seq: int
    time_ns: int
    step: int = 0


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


class GroupCreated(Event, frozen=True, kw_only=True):
    """A call that creates or destroys process groups, made by all `scope` ranks in one order.

    `ordinal` numbers these calls within `scope`. `ranks` are those asked for, in the order given;
    `done` is false while the call has not returned (`GroupCreated` is written before and after).
    """

    api: str
    ordinal: int
    scope: tuple[int, ...]
    ranks: tuple[int, ...]
    desc: str
    generation: int
    site: CallSite
    done: bool = False
    timeout_s: float | None = None
    backend: str = ""

    @property
    def has_processes(self) -> bool:
        """Whether a process stands behind each rank, which torch's fake and threaded groups lack.

        What destroys a group names no backend.
        """
        return bool(self.backend) and "fake" not in self.backend and "threaded" not in self.backend


class ProcessesSpawned(Event, frozen=True, kw_only=True):
    """``torch.multiprocessing`` starts processes, as a rule the ranks; this one is in no group."""

    number: int
    site: CallSite


class Collective(Event, frozen=True, kw_only=True):
    """A collective or point-to-point call, written before it was issued.

    Example: ``Collective(rank=1, seq=42, time_ns=…, group=ProcessGroup("0", "default_pg", (0, 1),
    "gloo"), collective_seq_id=7, signature=Signature("all_reduce", ((4,),), …), site=…)``.
    `collective_seq_id` counts the collectives of the group; point-to-point calls have -1 and are
    matched by peer and tag. `api` is the function that the user or a framework called, where known.
    """

    group: ProcessGroup
    collective_seq_id: int
    signature: Signature
    site: CallSite
    is_async: bool = False
    thread: str = "MainThread"
    api: str | None = None


class CollectiveState(Event, frozen=True, kw_only=True):
    """The call with event number `call` went on.

    issued: the backend took it. waited: the host waited for it. completed: the backend says so.
    failed: issuing or waiting raised. dropped: its Work was released and nobody had waited for it.
    """

    call: int
    state: Literal["issued", "waited", "completed", "failed", "dropped"]


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
    """An exception that nobody caught. `frames` innermost first."""

    type: str
    message: str
    frames: tuple[Frame, ...]
    traceback: str
    thread: str = "MainThread"


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


class Exited(Event, frozen=True, kw_only=True):
    """The monitor saw the process of a rank gone, after all its events were read.

    `status` is its exit status, or minus the number of the signal that ended it, or None where
    nobody could see it. `oom_kills` counts the processes that the kernel's out-of-memory killer has
    ended around this one since the rank began.
    """

    reason: str = ""
    status: int | None = None
    oom_kills: int = 0


class NodeLost(Event, frozen=True, kw_only=True):
    """The node of a rank fell silent without a good-bye; `time_ns` is when it was last heard of.

    It is said for each of its ranks that is not known to have ended.
    """

    hostname: str
    silent_s: float


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """The stack of one thread, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    holds_gil: bool = False
    active: bool = False


class Stacks(Event, frozen=True, kw_only=True):
    """The stacks of all threads of a rank. `source` names the tool; `error` why there are none."""

    source: str
    threads: tuple[ThreadStack, ...] = ()
    error: str = ""


Value = str | int | float | bool | None


class Observed(Event, frozen=True, kw_only=True):
    """What somebody outside of a rank's process saw of it, such as the kernel or the GPU's driver.

    `source` names who saw it, `summary` is one sentence, `values` are its figures by name (units in
    the names: ``rss_bytes``); `error` says why there is nothing.
    """

    source: str
    summary: str = ""
    values: dict[str, Value] = {}
    error: str = ""


class FileAction(StrEnum):
    """What is done with a path."""

    READ = "read"
    WRITE = "write"  # the content is replaced or changed in place
    APPEND = "append"
    RENAME = "rename"  # `origin` vanishes, `path` is there at once with all its content
    LINK = "link"
    REMOVE = "remove"
    REMOVE_TREE = "remove-tree"
    MAKE_DIR = "make-dir"
    LIST = "list"
    TEST = "test"  # whether it exists, or how large or old it is
    CONNECT = "connect"  # to the socket at this path
    LOCK = "lock"
    UNLOCK = "unlock"


class FileAccess(Event, frozen=True, kw_only=True):
    """An access to a path that other ranks may see, written before it happens.

    `path` is absolute, with the links of its folder resolved; `written` is what the program gave.
    `api` is what was called (``open``, ``torch.save``). `is_shared`: ranks of other nodes see the
    same file. `is_exclusive`: it is created, and that fails where it exists. `found` is the result
    of a `TEST`. `has_end`: a `FileClosed` will tell when it was over. `moved`: a digest of
    the small file that a `RENAME` puts in place.
    """

    action: FileAction
    path: str
    written: str
    site: CallSite
    api: str = "open"
    origin: str = ""
    is_shared: bool = False
    is_exclusive: bool = False
    found: bool | None = None
    has_end: bool = False
    moved: str | None = None
    thread: str = "MainThread"


class FileContent(msgspec.Struct, frozen=True, array_like=True):
    """What a small file held: its size in bytes and the checksums of its first blocks of 4 KiB."""

    size: int
    blocks: tuple[int, ...]


class FileClosed(Event, frozen=True, kw_only=True):
    """The access with event number `access` is over; `error` is what it raised, where known."""

    access: int
    error: str = ""
    content: FileContent | None = None


class StoreCall(Event, frozen=True, kw_only=True):
    """A call of the job's key-value store.

    Calls that publish (set, add, compare_set, delete) are written before, with `done` false; those
    that learn (get, wait, check, add, compare_set) after, with `done` true. `value` is a digest of
    what was set or read, or the number that ``add`` returned.
    """

    action: str
    store: str
    keys: tuple[str, ...]
    value: str = ""
    done: bool = False


class HostSynced(Event, frozen=True, kw_only=True):
    """The host waited for the device, and so for the collectives that were queued before."""

    api: str
