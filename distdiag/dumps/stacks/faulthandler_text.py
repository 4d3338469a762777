"""The stacks that Python's faulthandler prints: on a fatal error, a signal, or a timeout."""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from distdiag.dumps.log_lines import streams
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import (
    MAIN_THREAD,
    MOST_DUMPS,
    MOST_FRAMES,
    MOST_THREADS,
    python_frame,
    stacks_event,
)
from distdiag.events.base import Event, Frame
from distdiag.events.lifecycle import Exited
from distdiag.events.stacks import ThreadStack

_SIGN: Final = b"(most recent call first):"
_THREAD: Final = re.compile(
    r"(?:(Current thread|Thread) (0x[0-9A-Fa-f]{1,16})(?: \[(.{0,64})\])?|Stack)"
    r" \(most recent call first\):"
)
_FATAL: Final = re.compile(r"Fatal Python error: (.{1,300})")
# The signals that faulthandler handles, as it calls them; any other fatal error ends by abort().
_SIGNALS: Final = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
_TIMEOUT: Final = re.compile(r"Timeout \([\d:.]{1,30}\)!")
_FRAME: Final = re.compile(r'  File (?:"(.{0,1000})"|\?\?\?), line (\d{1,9}|\?\?\?) in (.{1,500})$')
# Whatever is not a frame of the thread: <no Python frame>, the mark of a cut, a running collector.
_NO_FRAME: Final = ("  <", "  ...", "  Garbage-collecting")


@dataclass
class _Thread:
    number: str
    is_current: bool
    frames: list[Frame] = field(default_factory=list)


@dataclass
class _Report:
    """One dump of all threads, which are listed with the youngest first."""

    fatal: str = ""
    threads: list[_Thread] = field(default_factory=list)

    def is_ended_by(self, number: str) -> bool:
        """Say whether a thread of this number belongs to another dump: no thread is in one twice.

        A dump of one thread only does not tell its number.
        """
        numbers = {thread.number for thread in self.threads}
        return number in numbers or "?" in (number, *numbers)

    def stacks(self) -> Iterator[ThreadStack]:
        main = self._main()
        for thread in self.threads:
            yield ThreadStack(
                name=MAIN_THREAD if thread is main else f"thread {thread.number}",
                frames=tuple(thread.frames),
                active=thread.is_current,
            )

    def _main(self) -> _Thread | None:
        """Return the thread that runs a script; where the stacks are cut, the oldest one."""
        scripts = (t for t in self.threads if t.frames and t.frames[-1].function == "<module>")
        return next(scripts, self.threads[-1] if self.threads else None)


class FaulthandlerText(DumpReader):
    """Read the output of faulthandler, also where it lies within a log."""

    name = "faulthandler"

    def recognises(self, dump: Dump) -> bool:
        """Look for the head of a thread."""
        return _SIGN in dump.data

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield all dumps of each rank; a fatal error also was the end of its process."""
        of_file = streams(dump)
        # Lines of a log with several writers that nobody signed are no process of their own.
        label = posixpath.basename(dump.path.replace("!", "/")) if len(of_file) == 1 else ""
        for speaker, lines in of_file:
            rank = UNKNOWN_RANK if speaker.rank is None else speaker.rank
            events: list[Event] = []
            for report in islice(_reports(lines()), MOST_DUMPS):
                events.append(stacks_event(speaker.rank, self.name, report.stacks()))
                if report.fatal:
                    reason = f"Fatal Python error: {report.fatal}"
                    status = -_SIGNALS.get(report.fatal.strip(), signal.SIGABRT)
                    events.append(
                        Exited(rank=rank, seq=-1, time_ns=0, reason=reason, status=status)
                    )
            if events:
                yield RankDump(
                    rank=speaker.rank,
                    local_rank=speaker.local_rank,
                    events=tuple(events),
                    path=dump.path,
                    source=self.name,
                    label=speaker.name or label,
                    pid=speaker.pid,
                )


def _reports(lines: Iterator[str]) -> Iterator[_Report]:
    report, thread = _Report(), None
    for line in lines:
        fatal = _FATAL.match(line)
        if fatal is not None or _TIMEOUT.match(line):
            if report.threads:
                yield report
            report, thread = _Report(fatal[1] if fatal else ""), None
        elif head := _THREAD.match(line):
            number = head[2] or "?"
            if report.threads and report.is_ended_by(number):
                yield report
                report = _Report()
            thread = _Thread(number, is_current=head[1] != "Thread")
            if len(report.threads) < MOST_THREADS:
                report.threads.append(thread)
        elif thread is not None:
            thread = _extended(thread, line)
    if report.threads:
        yield report


def _extended(thread: _Thread, line: str) -> _Thread | None:
    """Add a line to the stack of a thread; return None where the stack has ended."""
    if match := _FRAME.match(line):
        file, number, function = match.groups()
        if len(thread.frames) < MOST_FRAMES:
            thread.frames.append(python_frame(file or "???", number, function))
        return thread
    return thread if line.startswith(_NO_FRAME) else None
