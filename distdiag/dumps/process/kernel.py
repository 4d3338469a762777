"""What the kernel says of a rank: what it waits for, its memory, its children."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from distdiag.dumps.base import RankDumpSource
from distdiag.dumps.process.memory import read_cgroup_memory
from distdiag.dumps.process.proc import proc_text, status_fields
from distdiag.events.base import Value
from distdiag.events.stacks import Observed

# The system call that a thread is blocked in, and the file, pipe or socket that it waits for.

_CALLS: Final[Mapping[str, tuple[int | None, int | None, bool]]] = {
    "read": (0, 63, True),
    "write": (1, 64, True),
    "open": (2, None, False),
    "close": (3, 57, True),
    "stat": (4, None, False),
    "fstat": (5, 80, True),
    "lstat": (6, None, False),
    "poll": (7, None, False),
    "ioctl": (16, 29, True),
    "pread64": (17, 67, True),
    "pwrite64": (18, 68, True),
    "readv": (19, 65, True),
    "writev": (20, 66, True),
    "select": (23, None, False),
    "nanosleep": (35, 101, False),
    "sendfile": (40, 71, True),
    "connect": (42, 203, True),
    "accept": (43, 202, True),
    "sendto": (44, 206, True),
    "recvfrom": (45, 207, True),
    "sendmsg": (46, 211, True),
    "recvmsg": (47, 212, True),
    "clone": (56, 220, False),
    "fork": (57, None, False),
    "vfork": (58, None, False),
    "wait4": (61, 260, False),
    "fcntl": (72, 25, True),
    "flock": (73, 32, True),
    "fsync": (74, 82, True),
    "fdatasync": (75, 83, True),
    "truncate": (76, 45, False),
    "ftruncate": (77, 46, True),
    "getdents": (78, None, True),
    "rename": (82, None, False),
    "mkdir": (83, None, False),
    "unlink": (87, None, False),
    "rt_sigtimedwait": (128, 137, False),
    "futex": (202, 98, False),
    "io_getevents": (208, 4, False),
    "getdents64": (217, 61, True),
    "semtimedop": (220, 192, False),
    "clock_nanosleep": (230, 115, False),
    "epoll_wait": (232, None, False),
    "waitid": (247, 95, False),
    "openat": (257, 56, False),
    "newfstatat": (262, 79, False),
    "unlinkat": (263, 35, False),
    "pselect6": (270, 72, False),
    "ppoll": (271, 73, False),
    "epoll_pwait": (281, 22, False),
    "fallocate": (285, 47, True),
    "accept4": (288, 242, True),
    "preadv": (295, 69, True),
    "pwritev": (296, 70, True),
    "copy_file_range": (326, 285, True),
    "statx": (332, 291, False),
    "io_uring_enter": (426, 426, False),
    "clone3": (435, 435, False),
    "epoll_pwait2": (441, 441, False),
    "mkdirat": (None, 34, False),
    "renameat": (None, 38, False),
}
"""The number of each system call on x86_64 and on aarch64 (``syscall(2)``; None where it does not
exist), and whether its first argument is the descriptor that it waits for."""
_TAKES_DESCRIPTOR: Final = frozenset(name for name, (*_, takes) in _CALLS.items() if takes)
_COLUMNS: Final = {"x86_64": 0, "aarch64": 1}
_PATH_ARGUMENT: Final[Mapping[str, int]] = {
    **dict.fromkeys(("open", "stat", "lstat", "truncate", "rename", "mkdir", "unlink"), 0),
    **dict.fromkeys(("openat", "newfstatat", "unlinkat", "statx", "mkdirat", "renameat"), 1),
}
"""Which argument points to the path that a call asks for; the one before it is a folder's."""
_CURRENT_FOLDER: Final = 0xFFFFFF9C
"""`AT_FDCWD` of ``openat(2)``, as 32 bits."""
_LONGEST_PATH: Final = 4096
"""`PATH_MAX` of Linux."""

_SOCKET: Final = "socket:["
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


class BlockedCall(msgspec.Struct, frozen=True):
    """``BlockedCall("read", "/data/shard-3.tar", "nfs4", 5)``; what is not known is empty.

    `descriptor` is what it waits for, -1 where the call takes none.
    """

    name: str = ""
    target: str = ""
    file_system: str = ""
    descriptor: int = -1

    def __str__(self) -> str:
        """Return it as a part of a sentence, empty if nothing is known."""
        target = f"{self.target} ({self.file_system})" if self.file_system else self.target
        return f"{self.name} of {target}" if target else self.name


def read_blocked_call(pid: int, thread: int | None = None) -> BlockedCall:
    """Read which system call a thread of a process is in; the main thread if none is named."""
    text = proc_text(pid, "syscall" if thread is None else f"task/{thread}/syscall")
    number, _, arguments = text.partition(" ")
    if not number.isdigit():  # "running", "-1" in the kernel without a call, or not readable
        return BlockedCall()
    name = _names().get(int(number), f"system call {number}")
    if name in _PATH_ARGUMENT:
        path = _path_asked(pid, _PATH_ARGUMENT[name], arguments)
        return BlockedCall(name, path, _file_system(pid, path) if path else "")
    if name not in _TAKES_DESCRIPTOR:
        return BlockedCall(name)
    descriptor = int(arguments.split()[0], 16) & 0xFFFFFFFF
    try:
        target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return BlockedCall(name, f"descriptor {descriptor}", descriptor=descriptor)
    if target.startswith(_SOCKET):
        return BlockedCall(name, _ends(pid, descriptor) or "a socket", descriptor=descriptor)
    return BlockedCall(name, target, _file_system(pid, target), descriptor)


def _path_asked(pid: int, argument: int, arguments: str) -> str:
    """Return the path that a call was given; "" where the memory of the process is not readable.

    Nor is it read while a thread is in uninterruptible sleep: that may hold the lock of the memory,
    for which the reader would wait as long.
    """
    if any(_letter(pid, number) == _STUCK for number in _threads(pid)):
        return ""
    values = [int(value, 16) for value in arguments.split()]
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(values[argument])
            raw, ends, _ = memory.read(_LONGEST_PATH).partition(b"\0")
        folder = values[0] & 0xFFFFFFFF if argument else _CURRENT_FOLDER
        name = "cwd" if folder == _CURRENT_FOLDER else f"fd/{folder}"
        path = os.fsdecode(raw) if ends else ""
        is_below = path and not os.path.isabs(path)
        return os.path.join(os.readlink(f"/proc/{pid}/{name}"), path) if is_below else path
    except (OSError, ValueError, OverflowError):
        return ""


def _names() -> dict[int, str]:
    column = _COLUMNS.get(platform.machine())
    if column is None:
        return {}
    numbers = {name: numbers[column] for name, numbers in _CALLS.items()}
    return {number: name for name, number in numbers.items() if number is not None}


def _ends(pid: int, descriptor: int) -> str:
    """Return the two ends of a network connection."""
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except (psutil.Error, OSError):
        return ""
    for connection in connections:
        if connection.fd == descriptor:
            ends = (connection.laddr, connection.raddr)
            here, there = (f"{end.ip}:{end.port}" if end else "nobody" for end in ends)
            return f"the connection from {here} to {there}"
    return ""


def _file_system(pid: int, path: str) -> str:
    """Return the type of the file system that a file is on, without touching the file."""
    best, kind = "", ""
    for line in proc_text(pid, "mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields.split()[4])
        if len(point) >= len(best) and Path(path).is_relative_to(point):
            best, kind = point, rest.split()[0]
    return kind


# What all of it says of one rank.

STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, and not yet waited for by its parent",
    "X": "dead",
    "I": "idle",
}
MOST_CHILDREN: Final = 64
MOST_THREADS: Final = 4096

_STUCK: Final = "D"
_ZOMBIE: Final = "Z"


class Task:
    """One process or thread as the kernel sees it at one moment.

    `state` is the kernel's letter, `wchan` the kernel function that it sleeps in (empty where that
    is secret), `call` the system call.
    """

    def __init__(self, pid: int, thread: int | None = None) -> None:
        """Read it; `state` is empty where there is none."""
        folder = "" if thread is None else f"task/{thread}/"
        head, _, rest = proc_text(pid, f"{folder}stat").rpartition(")")
        self.pid = pid
        self.name = head.partition("(")[2]
        self.state = rest.split()[0] if rest else ""
        wchan = "" if self.state == "R" else proc_text(pid, f"{folder}wchan")
        self.wchan = "" if wchan == "0" else wchan
        self.call = BlockedCall() if self.state == "R" else read_blocked_call(pid, thread)

    def __str__(self) -> str:
        """Return what it does, as a part of a sentence."""
        text = STATES.get(self.state, f"in state {self.state}")
        if str(self.call):
            text += f" in {self.call}"
        return f"{text} ({self.wchan})" if self.wchan else text


class KernelView(RankDumpSource):
    """Read ``/proc``. Nothing is read there for which a stuck process would make us wait."""

    name = "kernel"

    def observe_rank(self, rank: int, pid: int, timeout_s: float) -> Observed:
        """Tell of a rank's main thread, its memory and its children."""
        main = Task(pid)
        if not main.state:
            return self.observed(rank, error="the process is gone")
        stuck = _stuck_threads(pid)
        children = descendants(pid)
        values: dict[str, Value] = {
            "state": main.state,
            "doing": str(main),
            "wchan": main.wchan,
            "syscall": main.call.name,
            "blocked_on": main.call.target,
            "file_system": main.call.file_system,
            "descriptor": main.call.descriptor if main.call.descriptor >= 0 else "",
            "uninterruptible_threads": ", ".join(f"{task.name}: {task}" for task in stuck),
            "num_children": len(children),
        }
        values = {name: value for name, value in values.items() if value != ""}
        values |= _memory(pid) | read_cgroup_memory(proc_text(pid, "cgroup"))
        values |= {f"child {child.pid}": f"{child.name}: {child}" for child in children}
        return self.observed(rank, _summary(main, stuck, children), values)


def _summary(main: Task, stuck: Sequence[Task], children: Sequence[Task]) -> str:
    parts = [f"the main thread is {main}"]
    if main.state == _STUCK:
        parts.append("mostly a file system or a device that does not answer")
    elif stuck:
        parts.append(f"the thread {stuck[0].name} is {stuck[0]}")
    waiting = [child for child in children if child.state == _STUCK]
    dead = [child for child in children if child.state == _ZOMBIE]
    if waiting:
        parts.append(f"the child {waiting[0].pid} ({waiting[0].name}) is {waiting[0]}")
    if dead:
        parts.append(f"the child {dead[0].pid} ({dead[0].name}) is {dead[0]}")
    return "; ".join(parts)


def _stuck_threads(pid: int) -> list[Task]:
    """Return the threads beside the main thread that are in uninterruptible sleep."""
    others = [number for number in _threads(pid) if number != pid]
    return [Task(pid, number) for number in others if _letter(pid, number) == _STUCK]


def _threads(pid: int) -> list[int]:
    try:
        numbers = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return numbers[:MOST_THREADS]


def _letter(pid: int, thread: int) -> str:
    rest = proc_text(pid, f"task/{thread}/stat").rpartition(")")[2].split()
    return rest[0] if rest else ""


def descendants(pid: int) -> list[Task]:
    """Return the descendants (workers of data loaders, among others), those in trouble first.

    The monitor is a child of a rank too, and what it starts: they are left out.
    """
    try:
        found = psutil.Process(pid).children(recursive=True)
        own = psutil.Process()
        if own in found:
            found = [child for child in found if child not in (own, *own.children(recursive=True))]
    except psutil.Error:
        return []
    tasks = [task for child in found if (task := Task(child.pid)).state]
    return sorted(tasks, key=lambda task: (task.state not in "DZTt", task.pid))[:MOST_CHILDREN]


def _memory(pid: int) -> dict[str, Value]:
    fields = status_fields(proc_text(pid, "status"))
    found: dict[str, Value] = {}
    for name, key in (("rss_bytes", "VmRSS"), ("swap_bytes", "VmSwap")):
        if fields.get(key, "").endswith(" kB"):
            found[name] = int(fields[key].split()[0]) * 1024
    for name, text in (
        ("num_threads", fields.get("Threads", "")),
        ("tracer_pid", fields.get("TracerPid", "0")),
        ("oom_score", proc_text(pid, "oom_score")),
    ):
        if text.isdigit() and (name, text) != ("tracer_pid", "0"):
            found[name] = int(text)
    return found
