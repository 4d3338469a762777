"""The system call that a thread is blocked in, and the file, pipe or socket that it waits for."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Final

import msgspec
import psutil

from distdiag.dumps.proc import proc_text

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
