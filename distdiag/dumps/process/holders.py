"""What a rank's main thread waits for outside of the rank, and who has it."""

from __future__ import annotations

import os
import platform
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from distdiag.dumps.base import RankDumpSource, StackSource
from distdiag.dumps.process.kernel import Task, descendants
from distdiag.dumps.process.locks import has_lock, has_pipe, lock_of_descriptor, read_locks
from distdiag.dumps.process.proc import all_pids, command_of, proc_text, read_process
from distdiag.events.base import Value
from distdiag.events.files import FileAccess, FileAction
from distdiag.events.stacks import Observed, ProcessSeen, ThreadStack

# A file that a program asks for again and again: which one, its records tell.

MOST_ASKED: Final = 16
"""One pass of a loop that polls for a lock makes a handful of accesses."""

_ORDER: Final = (
    FileAction.WRITE,
    FileAction.LOCK,
    FileAction.APPEND,
    FileAction.TEST,
    FileAction.LIST,
)
"""Who takes a lock file creates it, or opens it to lock it; who waits for a file asks for it, and
who waits for several lists their folder."""


class AskedFiles:
    """The files that each rank's main thread last asked for, from one line of the program."""

    def __init__(self) -> None:
        """Know of none."""
        self._by_rank: dict[int, list[FileAccess]] = {}

    def feed(self, access: FileAccess) -> None:
        """Take in an access of a rank."""
        if access.thread != "MainThread" or access.action not in _ORDER:
            return
        asked = self._by_rank.setdefault(access.rank, [])
        if asked and asked[0].site.location != access.site.location:
            asked.clear()
        if len(asked) < MOST_ASKED:
            asked.append(access)

    def last(self, rank: int) -> FileAccess | None:
        """Return the access by which a rank waits, if it waits for a file where it last used one.

        What is created exclusively comes first, then what is opened or locked, then questions.
        """
        asked = self._by_rank.get(rank, ())
        # Whoever lists a folder may ask before whether it is one.
        listed = {each.path for each in asked if each.action is FileAction.LIST}
        asked = [a for a in asked if a.action is FileAction.LIST or a.path not in listed]
        return min(asked, key=lambda a: (not a.is_exclusive, _ORDER.index(a.action)), default=None)


class Owner(NamedTuple):
    """Whom a lock file names: a pid (0 if none), and the host where that is (empty if unknown)."""

    pid: int = 0
    host: str = ""


LARGEST_LOCK_FILE: Final = 1024
"""Bytes; what holds more is no lock file (`filelock` reads no more either)."""
_OWNER_LINE: Final = re.compile(r"(?:pid\s*[=:]\s*)?(\d{1,10})", re.IGNORECASE)
_HOST_LINE: Final = re.compile(r"(?:host\w*\s*[=:]\s*)?([\w.-]{1,255})", re.IGNORECASE)


def parse_owner(text: str) -> Owner:
    """Read a pid, and a host behind it, as `filelock` and others write them into lock files."""
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        found = _OWNER_LINE.fullmatch(line)
        if found and int(found[1]) > 0:
            host = _HOST_LINE.fullmatch(lines[number + 1]) if number + 1 < len(lines) else None
            return Owner(int(found[1]), host[1] if host else "")
    return Owner()


def _read_small(path: str) -> tuple[str, os.stat_result] | None:
    """Return what a small regular file holds, empty text of anything else, None if it is not there.

    The rank has just asked for it and was answered, so its file system does not keep us waiting. A
    pipe is not opened: somebody may wait for just that.
    """
    data = b""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISREG(status.st_mode) and 0 < status.st_size <= LARGEST_LOCK_FILE:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            data = file.read(LARGEST_LOCK_FILE) or b""
    return data.decode("utf-8", "replace"), status


# ---

MOST_CHILDREN: Final = 8
MOST_STACKS: Final = 4
"""Reading a stack takes some 15 ms; children that do the same thing look alike."""
MOST_THREADS: Final = 8
MOST_FRAMES: Final = 24

_LOCK_CALLS: Final = frozenset({"flock", "fcntl"})
_PIPE: Final = "pipe:["
_TERMINALS: Final = ("/dev/pts/", "/dev/tty", "/dev/console")
_STDIN: Final = 0
_TIMERS: Final = frozenset({"nanosleep", "clock_nanosleep", "select", "pselect6"})
"""How `time.sleep` waits, by the version of Python."""

POLL_S: Final = 0.01
LONGEST_POLL_S: Final = 0.5
"""Loops that poll sleep for some 50 ms between their looks; a busy machine makes these longer."""
LOOKS_ALIKE: Final = 5
"""Whoever is in the same call at so many looks waits there, and does not ask for a file."""

SHARE: Final = 0.5
"""Of the time for an answer, so that what was found in that time is not too late."""


class _Awaited(NamedTuple):
    """What is waited for, `what` one of lock, lock-file, file, folder, pipe, terminal, input."""

    what: str = ""
    name: str = ""
    holders: tuple[int, ...] = ()
    more: Mapping[str, Value] = {}


class _Search:
    """Looks for processes that have something: first where it is likely, then among all."""

    def __init__(self, pid: int, near: Iterable[int], deadline: float) -> None:
        """Look for the process `pid`, among those `near` it first, until the deadline."""
        self.pid = pid
        self._near = tuple(near)
        self._deadline = deadline

    def __call__(self, first: Iterable[int], has_it: Callable[[int], bool]) -> tuple[int, ...]:
        """Return who has it: of `first` and those near it, or else of all processes."""
        seen = {os.getpid()}
        found: list[int] = []
        for group in ((*first, *self._near), all_pids()):
            for pid in group:
                if time.monotonic() > self._deadline:
                    return tuple(found)
                if pid not in seen and has_it(pid):
                    found.append(pid)
                seen.add(pid)
            if set(found) - {self.pid}:
                break
        return tuple(found)


def _sleeps(main: Task) -> bool:
    """Say whether a thread sleeps now and then, as one that asks again and again does."""
    deadline = time.monotonic() + LONGEST_POLL_S
    num_alike = 0
    while main.call.name not in _TIMERS:
        if num_alike >= LOOKS_ALIKE or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
        before, main = str(main), Task(main.pid)
        num_alike = num_alike + 1 if str(main) == before and main.state != "R" else 0
    return True


def _lock(main: Task, search: _Search) -> _Awaited:
    locks = read_locks()
    awaited = lock_of_descriptor(main.pid, main.call.descriptor, locks)
    if awaited is None:
        return _Awaited("lock", main.call.target)
    file = awaited.file
    named = [lock.pid for lock in locks if lock.file == file and not lock.waits and lock.pid > 0]
    found = search(named, lambda pid: has_lock(pid, file))
    # Where we may not look at the descriptors of others, the table must do.
    holders = found or tuple(pid for pid in named if read_process(pid) is not None)
    taker = next((pid for pid in named if pid not in holders), 0)
    return _Awaited("lock", main.call.target, holders, {"locked_by_pid": taker} if taker else {})


def _pipe(main: Task, search: _Search) -> _Awaited:
    call = main.call
    writes = call.name == "read"  # the end that is looked for is the other one
    holders = search((), lambda pid: has_pipe(pid, call.target, writes=writes))
    what = "input" if call.descriptor == _STDIN and writes else "pipe"
    others = tuple(pid for pid in holders if pid != main.pid)
    return _Awaited(what, call.target, others, {"way": call.name, "is_own": main.pid in holders})


def _polled(asked: FileAccess, search: _Search) -> _Awaited:
    frame = asked.site.location
    more: dict[str, Value] = {}
    if frame is not None:
        by = [f"{each.file}:{each.function}" for each in asked.site.frames[:MOST_FRAMES]]
        more = {"asked_file": frame.file, "asked_line": frame.line, "asked_by": "\n".join(by)}
    if asked.action is FileAction.LIST:
        return _Awaited("folder", asked.path, (), more)
    found = _read_small(asked.path)
    if found is None:
        return _Awaited("file", asked.path, (), more)
    text, status = found
    if not stat.S_ISREG(status.st_mode):
        return _Awaited()
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    named = [lock.pid for lock in read_locks() if lock.file == file and lock.pid > 0]
    holders = search(named, lambda pid: has_lock(pid, file)) if named else ()
    if holders:
        return _Awaited("lock", asked.path, holders, more)
    owner = parse_owner(text)
    is_here = owner.pid > 0 and owner.host in ("", platform.node())
    is_alive = is_here and owner.pid != search.pid and read_process(owner.pid) is not None
    more |= {"age_s": round(max(0.0, time.time() - status.st_mtime))}
    more |= {"owner_pid": owner.pid, "owner_host": owner.host} if owner.pid else {}
    return _Awaited("lock-file", asked.path, (owner.pid,) if is_alive else (), more)


class Holders(RankDumpSource):
    """Find who has the lock, the file or the pipe that a rank waits for, and look at its children.

    Nothing is opened for which a stuck process would make us wait.
    """

    name = "holders"

    def __init__(self, ranks: Callable[[], Mapping[int, int]], stacks: StackSource) -> None:
        """`ranks` returns the pids of this node's ranks; `stacks` reads those of others."""
        self._ranks = ranks
        self._stacks = stacks
        self.asked = AskedFiles()

    def observe_rank(self, rank: int, pid: int, timeout_s: float) -> Observed:
        """Tell what a rank waits for, who has that, and what its children do."""
        deadline = time.monotonic() + timeout_s * SHARE
        main = Task(pid)
        if not main.state:
            return self.observed(rank, error="the process is gone")
        children = descendants(pid)
        near = (*self._ranks().values(), *(child.pid for child in children))
        awaited = self._awaited(rank, main, _Search(pid, near, deadline))
        seen = self._processes(rank, pid, awaited.holders, children, deadline)
        values: dict[str, Value] = {}
        if awaited.what:
            values = {"waits_for": awaited.what, "name": awaited.name, **awaited.more}
        return self.observed(rank, _summary(awaited, seen), values, processes=seen)

    # What it is

    def _awaited(self, rank: int, main: Task, search: _Search) -> _Awaited:
        call = main.call
        if call.name in _LOCK_CALLS:
            return _lock(main, search)
        if call.name == "read" and call.target.startswith(_TERMINALS):
            return _Awaited("terminal", call.target)
        if call.name in ("read", "write") and call.target.startswith(_PIPE):
            return _pipe(main, search)
        if call.name == "read" and call.descriptor == _STDIN:
            return _Awaited("input", call.target)
        # Who is in another call for a file is not answered, and neither would we be.
        asked = self.asked.last(rank)
        return _polled(asked, search) if asked is not None and _sleeps(main) else _Awaited()

    # Who it is

    def _processes(
        self,
        rank: int,
        pid: int,
        holders: Iterable[int],
        children: Iterable[Task],
        deadline: float,
    ) -> tuple[ProcessSeen, ...]:
        tasks = {task.pid: task for task in children}
        shown = [each for each in holders if each != pid]
        shown += [each for each in list(tasks)[:MOST_CHILDREN] if each not in shown]
        kinds: set[tuple[str, str]] = set()
        found = []
        for each in shown:
            task = tasks.get(each) or Task(each)
            kind = (task.name, str(task))
            threads: tuple[ThreadStack, ...] = ()
            left_s = deadline - time.monotonic()
            is_new = kind not in kinds and len(kinds) < MOST_STACKS
            if is_new and left_s > 0 and self._may_look(each, task):
                kinds.add(kind)
                threads = _cut(self._stacks.dump(each, rank, left_s).threads)
            found.append(self._seen(task, threads, has_it=each in holders))
        return tuple(found)

    def _may_look(self, pid: int, task: Task) -> bool:
        """Say whether a process has a stack that the others do not know: it is Python, no rank."""
        return pid not in self._ranks().values() and task.state not in "ZX" and _is_python(pid)

    def _seen(self, task: Task, threads: tuple[ThreadStack, ...], *, has_it: bool) -> ProcessSeen:
        ranks = {each: number for number, each in self._ranks().items()}
        command = command_of(task.pid)
        above = next((each for each in _ancestors(task.pid) if each in ranks), 0)
        return ProcessSeen(
            pid=task.pid,
            command=command,
            doing=str(task),
            has_it=has_it,
            rank=ranks.get(task.pid),
            parent_rank=ranks.get(above),
            is_forked=above > 0 and command == command_of(above),
            exit_status=_exit_status(task.pid) if task.state == "Z" else None,
            threads=threads,
        )


MOST_ANCESTORS: Final = 64


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, and the parents of that."""
    for _ in range(MOST_ANCESTORS):
        fields = proc_text(pid, "stat").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
        if pid <= 1:
            return
        yield pid


def _is_python(pid: int) -> bool:
    """Say whether a process runs Python: only then there is a stack to be read."""
    try:
        program = Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return False
    return program.startswith("python") or "/libpython" in proc_text(pid, "maps")


def _exit_status(pid: int) -> int | None:
    try:
        reading = read_process(pid)
    except OSError:
        return None
    if reading is None or reading.state != "Z" or reading.wait_status is None:
        return None
    return os.waitstatus_to_exitcode(reading.wait_status)


def _cut(threads: Iterable[ThreadStack]) -> tuple[ThreadStack, ...]:
    """Keep the innermost frames of the first threads."""
    few = tuple(threads)[:MOST_THREADS]
    return tuple(ThreadStack(t.name, t.frames[:MOST_FRAMES], t.holds_gil, t.active) for t in few)


def _summary(awaited: _Awaited, seen: Iterable[ProcessSeen]) -> str:
    names = [f"process {each.pid} ({each.command})" for each in seen if each.has_it]
    who = ", ".join(names)
    match awaited.what:
        case "lock":
            text = f"{awaited.name} is locked by {who or 'nobody who can be seen on this node'}"
        case "lock-file":
            text = f"{awaited.name} is there, and {who or 'nobody'} has it"
        case "file":
            text = f"{awaited.name} is not there"
        case "pipe" | "input" if awaited.name.startswith(_PIPE):
            text = f"the other end of {awaited.name} is open in {who or 'no other process'}"
        case "terminal" | "input":
            text = f"the main thread waits for input from {awaited.name}"
        case _:
            text = "the main thread waits for no lock on a file, and for no pipe"
    return text
