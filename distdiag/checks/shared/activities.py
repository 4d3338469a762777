"""What a rank does outside of collectives, by its stack, the kernel and its phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from distdiag.checks.shared.holders import holding_ranks, is_in_store
from distdiag.events.base import Frame, Phase
from distdiag.findings.descriptions import blocking_call, main_stack
from distdiag.views.rank_states import RankState, RankStatus

KERNEL: Final = "kernel"
"""The source of `Observed` that has the system call of a rank's main thread."""


class Activity(StrEnum):
    """What keeps a rank from its next collective."""

    STOPPED = "stopped"
    HELD_GIL = "held-gil"
    DATA_LOADER = "data-loader"
    CHECKPOINT = "checkpoint"
    COMPILATION = "compilation"
    INITIALISATION = "initialisation"
    TEARDOWN = "teardown"
    FILE_ACCESS = "file-access"
    LOCK = "lock"
    CHILD_PROCESS = "child-process"
    NETWORK = "network"
    DEBUGGER = "debugger"
    STORE = "store"
    PERSON = "person"


@dataclass(frozen=True, slots=True)
class Doing:
    """An activity and the sign of it: a frame, a system call or a phase, as a phrase."""

    activity: Activity
    sign: str


class _Rule(NamedTuple):
    """Frames of these functions (all if none is named) in files that end so show an activity."""

    activity: Activity
    file: str
    functions: tuple[str, ...] = ()


# What the user's code asked for: the outermost frame that is known decides.
_PURPOSES: Final = (
    _Rule(Activity.DATA_LOADER, "torch/utils/data/"),
    _Rule(Activity.DATA_LOADER, "torchdata/"),
    _Rule(Activity.DATA_LOADER, "webdataset/"),
    _Rule(Activity.CHECKPOINT, "torch/serialization.py"),
    _Rule(Activity.CHECKPOINT, "torch/distributed/checkpoint/"),
    _Rule(Activity.CHECKPOINT, "safetensors/torch.py"),
    _Rule(Activity.COMPILATION, "torch/utils/cpp_extension.py"),
    _Rule(Activity.COMPILATION, "torch/utils/file_baton.py"),
    _Rule(Activity.COMPILATION, "torch/_dynamo/convert_frame.py"),
    _Rule(Activity.COMPILATION, "torch/_inductor/compile_fx.py"),
    _Rule(Activity.COMPILATION, "torch/_inductor/codecache.py"),
    _Rule(Activity.COMPILATION, "torch/_inductor/async_compile.py"),
    _Rule(Activity.COMPILATION, "triton/compiler/"),
    _Rule(Activity.COMPILATION, "triton/runtime/autotuner.py"),
    _Rule(Activity.COMPILATION, "triton/runtime/build.py"),
    _Rule(
        Activity.INITIALISATION,
        "torch/distributed/distributed_c10d.py",
        (
            "init_process_group",
            "new_group",
            "new_subgroups",
            "new_subgroups_by_enumeration",
            "split_group",
            "_new_group_with_tag",
            "_new_process_group_helper",
            "_store_based_barrier",
        ),
    ),
    _Rule(Activity.INITIALISATION, "torch/distributed/rendezvous.py"),
    _Rule(
        Activity.INITIALISATION,
        "torch/distributed/device_mesh.py",
        ("init_device_mesh", "_setup_world_group_and_device", "_init_process_groups"),
    ),
    _Rule(
        Activity.TEARDOWN,
        "torch/distributed/distributed_c10d.py",
        ("destroy_process_group", "_shutdown_backend", "_abort_process_group"),
    ),
    _Rule(Activity.TEARDOWN, "multiprocessing/util.py", ("_exit_function",)),
    _Rule(Activity.TEARDOWN, "threading.py", ("_shutdown",)),
    _Rule(Activity.TEARDOWN, "concurrent/futures/thread.py", ("_python_exit",)),
)

# Whom it waits for, else how: the innermost frame that is known decides.
_PARTNERS: Final = (
    _Rule(Activity.DEBUGGER, "/pdb.py"),
    _Rule(Activity.DEBUGGER, "/bdb.py"),
    _Rule(Activity.DEBUGGER, "IPython/terminal/debugger.py"),
    _Rule(Activity.DEBUGGER, "debugpy/"),
    _Rule(Activity.CHILD_PROCESS, "/subprocess.py"),
    _Rule(Activity.CHILD_PROCESS, "multiprocessing/popen_fork.py"),
    _Rule(Activity.CHILD_PROCESS, "multiprocessing/popen_spawn_posix.py"),
    _Rule(Activity.CHILD_PROCESS, "multiprocessing/pool.py"),
    _Rule(Activity.CHILD_PROCESS, "concurrent/futures/process.py"),
    _Rule(Activity.LOCK, "filelock/"),
    _Rule(Activity.NETWORK, "/ssl.py"),
    _Rule(Activity.NETWORK, "/socket.py"),
    _Rule(Activity.NETWORK, "http/client.py"),
)
_LOCKS: Final = (
    _Rule(Activity.LOCK, "/threading.py"),
    _Rule(Activity.LOCK, "/queue.py"),
    _Rule(Activity.LOCK, "multiprocessing/queues.py"),
    _Rule(Activity.LOCK, "multiprocessing/synchronize.py"),
    _Rule(Activity.LOCK, "multiprocessing/connection.py"),
    _Rule(Activity.LOCK, "concurrent/futures/_base.py"),
    _Rule(Activity.LOCK, "asyncio/base_events.py"),
    # In native stacks, whatever the library: "" is the end of every path.
    _Rule(
        Activity.LOCK,
        "",
        (
            "pthread_mutex_lock",
            "___pthread_mutex_lock",
            "__lll_lock_wait",
            "pthread_cond_wait",
            "___pthread_cond_wait",
            "pthread_cond_timedwait",
            "sem_wait",
            "__new_sem_wait_slow64",
            "do_futex_wait",
            "__futex_abstimed_wait_common",
            "__futex_abstimed_wait_common64",
            "take_gil",
            "PyThread_acquire_lock_timed",
        ),
    ),
)

# What the main thread waits for in a system call.
_BY_SYSTEM_CALL: Final = {
    name: activity
    for activity, *names in (
        (Activity.FILE_ACCESS, "open", "openat", "close", "fcntl", "flock", "ioctl"),
        (Activity.FILE_ACCESS, "stat", "lstat", "fstat", "newfstatat", "statx"),
        (Activity.FILE_ACCESS, "read", "pread64", "readv", "preadv", "sendfile"),
        (Activity.FILE_ACCESS, "write", "pwrite64", "writev", "pwritev", "copy_file_range"),
        (Activity.FILE_ACCESS, "fsync", "fdatasync", "truncate", "ftruncate", "fallocate"),
        (Activity.FILE_ACCESS, "rename", "renameat", "unlink", "unlinkat", "mkdir", "mkdirat"),
        (Activity.FILE_ACCESS, "getdents", "getdents64"),
        (Activity.LOCK, "futex", "semtimedop"),
        (Activity.CHILD_PROCESS, "wait4", "waitid"),
        (Activity.NETWORK, "connect", "accept", "accept4", "poll", "ppoll", "select", "pselect6"),
        (Activity.NETWORK, "sendto", "recvfrom", "sendmsg", "recvmsg"),
        (Activity.NETWORK, "epoll_wait", "epoll_pwait", "epoll_pwait2"),
    )
    for name in names
}
_BY_TARGET: Final = {
    "pipe:": Activity.CHILD_PROCESS,  # a pipe without a name: the other end is a relative
    "socket:": Activity.NETWORK,
    "the connection": Activity.NETWORK,
    "/dev/pts/": Activity.PERSON,
    "/dev/tty": Activity.PERSON,
    "/dev/console": Activity.PERSON,
}
_STDIN: Final = "0"
# Who is in one of these waits for other ranks, the device or a stranger, whatever its children do.
_NO_HELP: Final = (
    _Rule(Activity.INITIALISATION, "torch/distributed/"),
    _Rule(Activity.INITIALISATION, "torch/autograd/"),
    _Rule(Activity.INITIALISATION, "torch/cuda/"),
    _Rule(Activity.LOCK, "torch/utils/file_baton.py"),
    _Rule(Activity.LOCK, "filelock/"),
    _Rule(Activity.DEBUGGER, "/pdb.py"),
    _Rule(Activity.DEBUGGER, "/bdb.py"),
)
_BY_PHASE: Final = {
    Phase.DATALOADER: Activity.DATA_LOADER,
    Phase.CHECKPOINT: Activity.CHECKPOINT,
    Phase.COMPILE: Activity.COMPILATION,
}


def doing_of(state: RankState) -> Doing | None:
    """Return what a running rank does outside of collectives, or None if it is not known."""
    if state.status is not RankStatus.RUNNING or blocking_call(state) is not None:
        return None
    purpose = _purpose(state)
    if purpose is not None:
        return purpose
    stopped = _stopped(state)
    if stopped is not None:
        return stopped  # whoever held the GIL when it was stopped
    threads = state.stacks.threads if state.stacks is not None else ()
    if state.gil_held and any(thread.holds_gil for thread in threads):
        return _held_gil(state)
    if is_in_store(state):
        return Doing(Activity.STORE, f"in {state.asked.action} of the store" if state.asked else "")
    known = doing_by_stack(state) or _by_kernel(state) or _by_phase(state)
    return known or (_held_gil(state) if state.gil_held else None)


def _purpose(state: RankState) -> Doing | None:
    """Return what the rank is for where it stands, and what its main thread waits for there."""
    found = _match(_PURPOSES, reversed(main_stack(state.stacks)))
    doing = _kernel(state, "doing")
    if found is None or _stopped(state) is not None:
        return None
    return Doing(found.activity, f"{found.sign}, {doing}") if doing else found


def doing_by_stack(state: RankState) -> Doing | None:
    """Return what a rank does by its stack alone."""
    stack = main_stack(state.stacks)
    purpose = _match(_PURPOSES, reversed(stack))
    return purpose or _match(_PARTNERS, stack) or _match(_LOCKS, stack)


def is_busy(state: RankState) -> bool:
    """Say whether a rank uses the processor, or is ready to and has to wait for its turn.

    Who spins while it holds the GIL is stuck all the same. Who waits for processes that it started
    is as busy as they are: its own threads only look after them.
    """
    if is_helped(state):
        return True
    doing = doing_by_stack(state)
    if doing is not None and doing.activity is Activity.CHILD_PROCESS and _has_children(state):
        return any(": running" in child for child in _children(state))
    is_ready = _kernel(state, "state") == "R"
    return (state.is_working or is_ready) and not state.gil_held


def will_come(state: RankState, states: Mapping[int, RankState]) -> bool:
    """Say whether a rank is busy, or waits for what a busy rank has.

    That is the lock of a file, as far as it is known whose it is; and the end of a build, whose
    lock file names nobody, where another rank builds.
    """
    if is_busy(state):
        return True
    ahead = [states[rank] for rank in holding_ranks(state) if rank in states]
    if _compiles(state):
        ahead += [other for other in states.values() if _compiles(other)]
    return any(other.status is RankStatus.RUNNING and is_busy(other) for other in ahead)


def _compiles(state: RankState) -> bool:
    doing = doing_by_stack(state)
    return doing is not None and doing.activity is Activity.COMPILATION


def is_helped(state: RankState) -> bool:
    """Say whether children work for a rank, or it transfers data, and it may be waiting for that.

    The innermost frame that is not the user's own decides: a rank in a lock file or in the store
    does not wait for the children that it happens to have.
    """
    if state.help is None or state.gil_held or _stopped(state) is not None:
        return False
    stack = main_stack(state.stacks)
    inner = next((frame for frame in stack if not frame.user), None)
    return inner is None or _match(_NO_HELP, (inner,)) is None


def common_activity(states: Iterable[RankState]) -> Activity | None:
    """Return the activity that all of these ranks share, or None."""
    found = {doing.activity if (doing := doing_of(state)) else None for state in states}
    return found.pop() if len(found) == 1 else None


def _match(rules: Iterable[_Rule], frames: Iterable[Frame]) -> Doing | None:
    for frame in frames:
        if frame.user:
            continue
        file = frame.file.replace("\\", "/")
        for rule in rules:
            is_here = rule.file in file if rule.file.endswith("/") else file.endswith(rule.file)
            if is_here and (not rule.functions or frame.function in rule.functions):
                return Doing(rule.activity, f"in {frame.function} of {_short(file)}")
    return None


def _short(file: str) -> str:
    """Return a file of an installed package from the name of the package on."""
    _, package, below = file.rpartition("-packages/")
    return below if package else file.rpartition("/")[2]


def _stopped(state: RankState) -> Doing | None:
    letter = _kernel(state, "state")
    if letter not in ("T", "t"):
        return None
    return Doing(Activity.STOPPED, "by a signal" if letter == "T" else "by a debugger")


def _held_gil(state: RankState) -> Doing:
    return Doing(Activity.HELD_GIL, _kernel(state, "doing"))


def _by_kernel(state: RankState) -> Doing | None:
    if state.is_working:
        return None  # it goes in and out of system calls
    doing = _kernel(state, "doing")
    if _kernel(state, "state") == "D":
        return Doing(Activity.FILE_ACCESS, doing)
    target = _kernel(state, "blocked_on")
    activity = _BY_SYSTEM_CALL.get(_kernel(state, "syscall"))
    if activity is Activity.FILE_ACCESS:
        activity = next((a for sign, a in _BY_TARGET.items() if target.startswith(sign)), activity)
        if _kernel(state, "syscall") == "read" and _kernel(state, "descriptor") == _STDIN:
            activity = Activity.PERSON
    return Doing(activity, doing) if activity is not None else None


def _by_phase(state: RankState) -> Doing | None:
    activity = _BY_PHASE.get(state.phase) if not main_stack(state.stacks) else None
    return Doing(activity, f"in phase {state.phase}") if activity is not None else None


def _has_children(state: RankState) -> bool:
    return _kernel(state, "num_children") not in ("", "0")


def _children(state: RankState) -> list[str]:
    """Return what the kernel says of each child, as far as it was asked."""
    seen = state.observed.get(KERNEL)
    values = seen.values.items() if seen is not None else ()
    return [str(value) for name, value in values if name.startswith("child ")]


def _kernel(state: RankState, name: str) -> str:
    seen = state.observed.get(KERNEL)
    return str(seen.values.get(name, "")) if seen is not None else ""
