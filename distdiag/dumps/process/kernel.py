"""What the kernel says of a rank: what it waits for, its memory, its children."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from distdiag.dumps.base import RankWitness
from distdiag.dumps.process.memory import read_cgroup_memory
from distdiag.dumps.process.proc import proc_text, status_fields
from distdiag.events.base import Value
from distdiag.events.stacks import Observed

# The system call that a thread is blocked in, and the file, pipe or socket that it waits for.

_X86_64: Final = """
    0 read 1 write 2 open 3 close 4 stat 5 fstat 6 lstat 7 poll 16 ioctl 17 pread64 18 pwrite64
    19 readv 20 writev 23 select 35 nanosleep 40 sendfile 42 connect 43 accept 44 sendto
    45 recvfrom 46 sendmsg 47 recvmsg 56 clone 57 fork 58 vfork 61 wait4 72 fcntl 73 flock
    74 fsync 75 fdatasync 76 truncate 77 ftruncate 78 getdents 82 rename 83 mkdir 87 unlink
    128 rt_sigtimedwait 202 futex 208 io_getevents 217 getdents64 220 semtimedop
    230 clock_nanosleep 232 epoll_wait 247 waitid 257 openat 262 newfstatat 263 unlinkat
    270 pselect6 271 ppoll 281 epoll_pwait 285 fallocate 288 accept4 295 preadv 296 pwritev
    326 copy_file_range 332 statx 426 io_uring_enter 435 clone3 441 epoll_pwait2
"""
_AARCH64: Final = """
    4 io_getevents 22 epoll_pwait 25 fcntl 29 ioctl 32 flock 34 mkdirat 35 unlinkat 38 renameat
    45 truncate 46 ftruncate 47 fallocate 56 openat 57 close 61 getdents64 63 read 64 write
    65 readv 66 writev 67 pread64 68 pwrite64 69 preadv 70 pwritev 71 sendfile 72 pselect6
    73 ppoll 79 newfstatat 80 fstat 82 fsync 83 fdatasync 95 waitid 98 futex 101 nanosleep
    115 clock_nanosleep 137 rt_sigtimedwait 192 semtimedop 202 accept 203 connect 206 sendto
    207 recvfrom 211 sendmsg 212 recvmsg 220 clone 242 accept4 260 wait4 285 copy_file_range
    291 statx 426 io_uring_enter 435 clone3 441 epoll_pwait2
"""
_TABLES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}

_TAKES_DESCRIPTOR: Final = frozenset(
    """
    read write close fstat ioctl pread64 pwrite64 readv writev sendfile connect accept sendto
    recvfrom sendmsg recvmsg fcntl flock fsync fdatasync ftruncate getdents getdents64 fallocate
    accept4 preadv pwritev copy_file_range
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
"""Their first argument is the descriptor that they wait for."""

_SOCKET: Final = "socket:["
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


class BlockedCall(msgspec.Struct, frozen=True):
    """``BlockedCall("read", "/data/shard-3.tar", "nfs4")``; what is not known is empty."""

    name: str = ""
    target: str = ""
    file_system: str = ""

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
    if name not in _TAKES_DESCRIPTOR:
        return BlockedCall(name)
    descriptor = int(arguments.split()[0], 16) & 0xFFFFFFFF
    try:
        target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return BlockedCall(name, f"descriptor {descriptor}")
    if target.startswith(_SOCKET):
        return BlockedCall(name, _ends(pid, descriptor) or "a socket")
    return BlockedCall(name, target, _file_system(pid, target))


def _names() -> dict[int, str]:
    words = _TABLES.get(platform.machine(), "").split()
    return {int(number): name for number, name in zip(words[::2], words[1::2], strict=True)}


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


# ---

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


class KernelView(RankWitness):
    """Read ``/proc``. Nothing is read there for which a stuck process would make us wait."""

    name = "kernel"

    def observe_rank(self, rank: int, pid: int, timeout_s: float) -> Observed:
        """Tell of a rank's main thread, its memory and its children."""
        main = Task(pid)
        if not main.state:
            return self.observed(rank, error="the process is gone")
        stuck = _stuck_threads(pid)
        children = _children(pid)
        values: dict[str, Value] = {
            "state": main.state,
            "doing": str(main),
            "wchan": main.wchan,
            "syscall": main.call.name,
            "blocked_on": main.call.target,
            "file_system": main.call.file_system,
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
    try:
        numbers = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    others = [number for number in numbers[:MOST_THREADS] if number != pid]
    return [Task(pid, number) for number in others if _letter(pid, number) == _STUCK]


def _letter(pid: int, thread: int) -> str:
    rest = proc_text(pid, f"task/{thread}/stat").rpartition(")")[2].split()
    return rest[0] if rest else ""


def _children(pid: int) -> list[Task]:
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
