"""Who has a file locked, and who has the other end of a pipe: read from the kernel's tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from distdiag.dumps.process.proc import proc_text

TABLE: Final = Path("/proc/locks")

# ``12: -> FLOCK  ADVISORY  WRITE 4711 fe:00:2147081 0 EOF``, see proc_locks(5).
_LINE: Final = re.compile(
    r"\d+:\s+(?P<waits>->\s+)?(?P<kind>\w+)\s+\w+\s+(?P<mode>\w+)\s+(?P<pid>-?\d+)\s+"
    r"(?P<file>[0-9a-f]+:[0-9a-f]+:\d+)\s"
)


class FileLock(NamedTuple):
    """One line of the kernel's table of locks: somebody has a lock, or `waits` for one.

    `kind` is FLOCK, POSIX or OFDLCK, `mode` READ or WRITE, `file` the device and inode as the
    kernel writes them. `pid` is who asked for the lock; it is not above 0 where the lock belongs to
    no single process, or to one that we may not see.
    """

    waits: bool
    kind: str
    mode: str
    pid: int
    file: str


def parse_locks(text: str) -> tuple[FileLock, ...]:
    """Take the kernel's table of locks apart; lines of another form are left out."""
    found = (_LINE.match(line.strip() + " ") for line in text.splitlines())
    return tuple(
        FileLock(bool(each["waits"]), each["kind"], each["mode"], int(each["pid"]), each["file"])
        for each in found
        if each
    )


def read_locks() -> tuple[FileLock, ...]:
    """Return all locks on files of this machine; empty where the kernel does not tell."""
    try:
        return parse_locks(TABLE.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return ()


def lock_of_descriptor(pid: int, descriptor: int, locks: Iterable[FileLock]) -> FileLock | None:
    """Return the lock that a process waits for by one of its descriptors."""
    inode = _field(_fdinfo(pid, descriptor), "ino")
    waiting = [lock for lock in locks if lock.waits and lock.pid in (pid, -1, 0)]
    if inode:
        waiting = [lock for lock in waiting if lock.file.rpartition(":")[2] == inode]
    return next(iter(sorted(waiting, key=lambda lock: lock.pid != pid)), None)


def has_lock(pid: int, file: str) -> bool:
    """Say whether a process has a file open by which that file is locked.

    A process that inherited the open file has the lock as well: it is given back when the last one
    closes it.
    """
    texts = (_fdinfo(pid, descriptor) for descriptor in _descriptors(pid))
    lines = (line for text in texts for line in text.splitlines())
    found = (parse_locks(line.partition(":")[2]) for line in lines if line.startswith("lock:"))
    return any(lock.file == file for locks in found for lock in locks)


def has_pipe(pid: int, pipe: str, *, writes: bool) -> bool:
    """Say whether a process has the writing (or else the reading) end of ``pipe:[4711]`` open."""
    for descriptor in _descriptors(pid):
        try:
            is_it = os.readlink(f"/proc/{pid}/fd/{descriptor}") == pipe
        except OSError:
            continue
        if is_it:
            mode = int(_field(_fdinfo(pid, descriptor), "flags") or "0", 8) & os.O_ACCMODE
            if mode == os.O_RDWR or (mode == os.O_WRONLY) is writes:
                return True
    return False


def _descriptors(pid: int) -> Iterator[int]:
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")
    except OSError:
        return
    yield from (int(name) for name in names if name.isdigit())


def _fdinfo(pid: int, descriptor: int) -> str:
    return proc_text(pid, f"fdinfo/{descriptor}")


def _field(text: str, name: str) -> str:
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")
