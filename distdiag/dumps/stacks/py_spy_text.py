"""The text that ``py-spy dump`` prints, of one process or of several."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from distdiag.dumps.log_lines import streams
from distdiag.dumps.reading import Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import (
    MOST_DUMPS,
    MOST_FRAMES,
    MOST_THREADS,
    DumpedProcess,
    python_frame,
    rank_dumps,
)
from distdiag.events.base import Frame
from distdiag.events.stacks import ThreadStack

_SIGN: Final = re.compile(rb"Thread (?:0x[0-9A-Fa-f]{1,16}|\d{1,20}) \((?:active|idle)")
_PROCESS: Final = re.compile(r"Process (\d{1,10}): (.{0,300})")
_THREAD: Final = re.compile(
    r'Thread (0x[0-9A-Fa-f]{1,16}|\d{1,20}) \(((?:active|idle)[^)]{0,20})\)(?:: "(.{0,200})")?$'
)
# ``function (file:line)`` of a Python frame, ``function (library)`` of a native one. Arguments and
# local variables are indented further.
_FRAME: Final = re.compile(r"    (\S.{0,500}?) \(([^()]{1,1000}?)(?::(\d{1,9}))?\)$")


@dataclass
class _Process:
    pid: int | None
    title: str = ""
    threads: list[ThreadStack] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    header: re.Match[str] | None = None

    def begin_thread(self, header: re.Match[str] | None) -> None:
        """End the thread that is being read, and begin the next one."""
        if self.header is not None and len(self.threads) < MOST_THREADS:
            number, state, name = self.header.groups()
            self.threads.append(
                ThreadStack(
                    name=name or f"thread {number}",
                    frames=tuple(self.frames),
                    holds_gil="gil" in state,
                    active=state.startswith("active"),
                )
            )
        self.header, self.frames = header, []


class PySpyText(DumpReader):
    """Read the human form of py-spy dumps, with or without local variables and native frames."""

    name = "py-spy-text"

    def recognises(self, dump: Dump) -> bool:
        """Look for the head of a thread."""
        return _SIGN.search(dump.data) is not None

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the stacks of each process that is or may be a rank."""
        found = [
            DumpedProcess(
                tuple(process.threads),
                process.pid,
                process.title,
                speaker.rank,
                speaker.local_rank,
            )
            for speaker, lines in streams(dump)
            for process in islice(_processes(lines()), MOST_DUMPS)
        ]
        yield from rank_dumps(found, dump.path, self.name)


def _processes(lines: Iterator[str]) -> Iterator[_Process]:
    process = _Process(None)
    for line in lines:
        if line.startswith("    "):
            if process.header is not None and len(process.frames) < MOST_FRAMES:
                process.frames.extend(_frame(line))
        elif match := _PROCESS.match(line):
            process.begin_thread(None)
            if process.threads:
                yield process
            process = _Process(int(match[1]), match[2])
        else:
            process.begin_thread(_THREAD.match(line))
    process.begin_thread(None)
    if process.threads:
        yield process


def _frame(line: str) -> Iterator[Frame]:
    match = _FRAME.match(line)
    if match is None:
        return
    function, file, number = match.groups()
    if number is None:
        yield Frame(file, 0, function, user=False)
    else:
        yield python_frame(file, number, function)
