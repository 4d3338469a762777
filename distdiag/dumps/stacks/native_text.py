"""Native stacks in text: gdb's ``thread apply all bt``, lldb's ``bt all``, pstack, eu-stack."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from distdiag.dumps.log_lines import streams
from distdiag.dumps.reading import Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import (
    MAIN_THREAD,
    MOST_DUMPS,
    MOST_FRAMES,
    MOST_THREADS,
    DumpedProcess,
    line_number,
    python_frame,
    rank_dumps,
)
from distdiag.events.base import Frame
from distdiag.events.stacks import ThreadStack

_SIGN: Final = re.compile(
    rb"^(?:Thread \d{1,6} \((?:Thread |LWP |process )|TID \d{1,10}:|#0 {1,3}0x[0-9a-f]{1,16} "
    rb"|[* ] thread #1[, ])",
    re.MULTILINE,
)
_GDB_THREAD: Final = re.compile(
    r"Thread (\d{1,6}) \((?:Thread 0x[0-9a-f]{1,16} )?\(?(?:LWP |process )?(\d{1,10})?\)?"
    r'(?: "(.{0,64})")?'
)
_EU_PROCESS: Final = re.compile(r"PID (\d{1,10}) - ")
_EU_THREAD: Final = re.compile(r"TID (\d{1,10}):")
_FRAME: Final = re.compile(
    r"#(\d{1,5})\s{1,4}(?:(0x[0-9a-f]{1,16})(?: - 1)? (?:in )?)?\s{0,4}(\S.{0,4000})"
)
_PLACE: Final = re.compile(r" (?:at (\S{1,1000}):(\d{1,9})|from (\S{1,1000})|- (/\S{1,1000}))$")
# What gdb's py-bt prints inside a thread.
_PYTHON_FRAME: Final = re.compile(r'\s{0,4}File "(.{0,1000}?)", line (\d{1,9}), in (\S{1,500})')
# lldb, with frames like ``frame #1: 0x7f… libtorch.so`c10d::Work::wait(…) at Work.cpp:7:3``.
_LLDB_PROCESS: Final = re.compile(
    r"Process (\d{1,10}) stopped|\(lldb\) .{0,40}?-p(?:id)? (\d{1,10})"
)
_LLDB_THREAD: Final = re.compile(
    r"[* ] thread #(\d{1,6})(?:, (?:tid = (0x[0-9a-f]{1,16}|\d{1,10})|name = '(.{0,64}?)'"
    r"|queue = .{0,80}?|stop reason = .{0,80}?)){0,4}$"
)
_LLDB_FRAME: Final = re.compile(
    r"[* ]{3,4} frame #\d{1,5}: 0x[0-9a-f]{1,16} ([^`]{1,300})`(.{1,4000})$"
)
_LLDB_PLACE: Final = re.compile(r" at ([^\s:]{1,1000}):(\d{1,9})(?::\d{1,9})?(?: \[.{1,40}\])?$")
_LONGEST_NAME: Final = 300


@dataclass
class _Thread:
    number: str
    lwp: int | None
    label: str
    is_main: bool = False
    frames: list[Frame] = field(default_factory=list)


@dataclass
class _Process:
    pid: int | None = None
    threads: list[_Thread] = field(default_factory=list)

    def add(self, thread: _Thread) -> _Thread:
        """Begin the stack of one more thread."""
        if len(self.threads) < MOST_THREADS:
            self.threads.append(thread)
        return thread

    def stacks(self) -> Iterator[ThreadStack]:
        """Yield the threads; the main one's number is that of the process."""
        for thread in self.threads:
            is_known = self.pid is not None and any(t.lwp == self.pid for t in self.threads)
            is_main = thread.lwp == self.pid if is_known else thread.is_main
            name = MAIN_THREAD if is_main else thread.label
            yield ThreadStack(name=name, frames=tuple(thread.frames))


class NativeText(DumpReader):
    """Read what a debugger printed of all threads of a process."""

    name = "native-text"

    def recognises(self, dump: Dump) -> bool:
        """Look for the head of a thread, or for an innermost frame."""
        return _SIGN.search(dump.data) is not None

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the stacks of each process."""
        found = [
            DumpedProcess(
                tuple(process.stacks()),
                process.pid or next((t.lwp for t in process.threads if t.is_main), None),
                rank=speaker.rank,
                local_rank=speaker.local_rank,
            )
            for speaker, lines in streams(dump)
            for process in islice(_processes(lines()), MOST_DUMPS)
        ]
        yield from rank_dumps(found, dump.path, self.name)


def _processes(lines: Iterator[str]) -> Iterator[_Process]:
    process, thread = _Process(), None
    for line in lines:
        if match := _EU_PROCESS.match(line) or _LLDB_PROCESS.match(line):
            if process.threads:
                yield process
            process, thread = _Process(_first_number(match)), None
        elif header := _header(line):
            # gdb numbers the threads of a process: the same number again is another process.
            if any(known.number == header.number for known in process.threads):
                yield process
                process = _Process()
            thread = process.add(header)
        elif (frame := _frame(line)) is not None:
            if thread is None and not _PYTHON_FRAME.match(line):
                thread = process.add(_Thread("", None, MAIN_THREAD, is_main=True))
            if thread is not None:
                _add(thread, frame)
    if any(thread.frames for thread in process.threads):
        yield process


def _header(line: str) -> _Thread | None:
    if match := _EU_THREAD.match(line):
        return _Thread(match[1], int(match[1]), f"thread {match[1]}")
    if match := _LLDB_THREAD.match(line):
        return _lldb_thread(match)
    if line.endswith(":") and (match := _GDB_THREAD.match(line)):
        number, lwp, name = match.groups()
        label = f"{name or 'thread'} {lwp or number}"
        return _Thread(number, int(lwp) if lwp else None, label, is_main=number == "1")
    return None


def _add(thread: _Thread, frame: Frame) -> None:
    if len(thread.frames) < MOST_FRAMES:
        thread.frames.append(frame)


def _native_frame(match: re.Match[str]) -> Frame:
    """Return a frame with its source file, else its library, else ``""``."""
    text = match[3].rstrip()
    place = _PLACE.search(text, max(0, len(text) - 1100))
    if place is None:
        return Frame("", 0, _function(text), user=False)
    source, number, *libraries = place.groups()
    file = source or libraries[0] or libraries[1]
    return Frame(file, line_number(number), _function(text[: place.start()]), user=False)


def _frame(line: str) -> Frame | None:
    """Return the frame that a line shows: of gdb, of lldb, or of Python within them."""
    if match := _LLDB_FRAME.match(line):
        return _lldb_frame(match)
    if match := _FRAME.match(line):
        return _native_frame(match)
    if match := _PYTHON_FRAME.match(line):
        return python_frame(match[1], match[2], match[3])
    return None


def _lldb_thread(match: re.Match[str]) -> _Thread:
    number, tid, name = match.groups()
    lwp = int(tid, 0) if tid else None
    return _Thread(number, lwp, f"{name or 'thread'} {lwp or number}", is_main=number == "1")


def _first_number(match: re.Match[str]) -> int:
    return int(next(number for number in match.groups() if number))


def _lldb_frame(match: re.Match[str]) -> Frame:
    """Return a frame with its source file, else its library; offsets and arguments are left out."""
    library, text = match.groups()
    place = _LLDB_PLACE.search(text, max(0, len(text) - 1100))
    name = _before_arguments((text[: place.start()] if place else text).partition(" + ")[0])
    if place is None:
        return Frame(library, 0, name, user=False)
    return Frame(place[1], line_number(place[2]), name, user=False)


def _before_arguments(text: str) -> str:
    """Return ``wait`` for ``wait(this=0x1)``; templates may hold brackets."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "<") - (character == ">")
        is_name = text.startswith("(anonymous", place) or text.endswith("operator", 0, place)
        if character == "(" and depth <= 0 and place and not is_name:
            return text[:place][:_LONGEST_NAME]
    return text[:_LONGEST_NAME]


def _function(text: str) -> str:
    """Return the name of a function without its arguments; templates may hold brackets."""
    depth = 0
    for place, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth <= 0 and text[place - 1 : place] == " ":
            return text[: place - 1].rstrip()[:_LONGEST_NAME]
    return text.partition(" (")[0][:_LONGEST_NAME]
