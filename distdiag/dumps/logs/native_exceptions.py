"""Exceptions of C++ that ended a process, which leave no traceback of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from distdiag.dumps.log_lines import Log, PlacedLine, Speaker, open_log
from distdiag.dumps.logs.group_messages import rank_in
from distdiag.dumps.logs.tracebacks import HEAD
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.events.lifecycle import Raised
from distdiag.findings.known_faults import fault_of_exception

_WATCHDOG: Final = re.compile(
    r"thread terminated with exception: ((?:[A-Z]{2,4} error|\w+): .{1,400})$"
)
_WHAT: Final = re.compile(r"^\s{0,8}what\(\):\s{1,4}(.{1,400})$")
_INSTANCE: Final = re.compile(r"terminate called after throwing an instance of '([\w:]{1,100})'")
_WORDS: Final = (b"thread terminated with exception: ", b"what():  ")
_TYPE: Final = "c10::Error"
"""What torch throws; the type is told by the line before, or not at all."""


class NativeExceptions(DumpReader):
    """Read what C++ says of the exception that ended a process, where its cause is well known.

    A rank that wrote a traceback has said more. Of other exceptions the end of the process is
    enough: most of them only pass on that a collective failed.
    """

    name = "native-exceptions"

    def recognises(self, dump: Dump) -> bool:
        """Look for the words that stand before such a message."""
        return any(word in dump.data for word in _WORDS)

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the first exception of each process."""
        log = open_log(dump)
        told = {line.speaker for line in log.lines_with((HEAD.encode(),))}
        if Speaker() in told:
            return  # it may be of any of them
        for line in log.lines_with(_WORDS):
            speaker = line.speaker if line.speaker != Speaker() else Speaker(rank_in(line.text))
            message = _message(line.text)
            if not message or speaker in told or speaker == Speaker():
                continue
            kind = _type(log, line)
            fault = fault_of_exception(kind, message)
            if fault is None or fault.role != "cause":
                continue
            told.add(speaker)
            yield _dump(dump, log, line.place, speaker, kind, message)


def _message(text: str) -> str:
    match = _WATCHDOG.search(text) or _WHAT.search(text)
    return match[1].strip() if match is not None else ""


def _type(log: Log, line: PlacedLine) -> str:
    above = log.text(*log.before(line.place))
    match = _INSTANCE.search(above)
    return match[1] if match is not None else _TYPE


def _dump(dump: Dump, log: Log, place: int, speaker: Speaker, kind: str, message: str) -> RankDump:
    event = Raised(
        rank=UNKNOWN_RANK if speaker.rank is None else speaker.rank,
        seq=-1,
        time_ns=log.time_ns(place),
        type=kind,
        message=message,
        frames=(),
        traceback="",
    )
    return RankDump(
        rank=speaker.rank,
        local_rank=speaker.local_rank,
        label=speaker.name,
        node=speaker.label if speaker.local_rank is not None else "",
        pid=speaker.pid,
        place=place,
        events=(event,),
        path=dump.path,
        source=NativeExceptions.name,
    )
