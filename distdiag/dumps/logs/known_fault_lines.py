"""Lines of well-known faults in logs: those of the ranks, of launchers and of the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from distdiag.dumps.log_lines import Log, PlacedLine, Speaker, open_log, streams
from distdiag.dumps.logs.group_messages import rank_in
from distdiag.dumps.logs.survival import restarted_at
from distdiag.dumps.logs.traceback_text import SURVIVED_AFTER, lines_survived
from distdiag.dumps.logs.tracebacks import HEAD
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.events.stacks import FaultLogged
from distdiag.findings.known_faults import KnownFault, fault_of_line, known_faults

MOST_FAULTS: Final = 20
"""So many different faults are kept of one speaker."""
LONGEST_TEXT: Final = 300

SIGNS: Final = (
    b"Error",
    b"ERROR",
    b"error:",
    b"errors.",
    b"xception",
    b"ncclInvalid",
    b"is lost",
    b"NCCL WARN",
    b"ailed",
    b"ailure",
    b"Xid (",
    b"illed",
    b"xceeded",
    b"EADDRINUSE",
    b"terminate called",
    b"atchdog ",
    b"etected",
    b"Assertion `",
    b"oom",
    b"kill",
    b"times out",
    b"timeout",
    b"imed out",
    b"access fault",
    b"temporarily",
    b"new thread",
    b"fallen off",
    b"async fatal",
    b"have different",
    b"inconsistent between",
    b"marked dead",
)
"""Each line of a fault holds one of these, so that most files need not be searched for 150 words.

A test keeps that true.
"""
_HEAD: Final = 4096
_PICKLE: Final = b"\x80"
_WIDE: Final = (b"\xff\xfe", b"\xfe\xff")
_RECORDER: Final = b'"pg_config"'
_WORDS: Final = tuple(word.encode() for row in known_faults() for word in row.words)


def any_of(words: Iterable[bytes]) -> re.Pattern[bytes]:
    """Return a pattern of all words in which common beginnings stand once.

    So it takes a fourth of the time of a plain list, and a tenth of that of a search for each.
    """
    tree: dict[int, Any] = {}
    for word in words:
        node = tree
        for sign in word:
            node = node.setdefault(sign, {})
        node.clear()  # where a word begins with another one the shorter is found
    return re.compile(_pattern(tree))


def _pattern(tree: dict[int, Any]) -> bytes:
    ways = [re.escape(bytes([sign])) + _pattern(below) for sign, below in tree.items()]
    return ways[0] if len(ways) == 1 else b"(?:" + b"|".join(ways) + b")" if ways else b""


_ANY_WORD: Final = any_of(sorted(_WORDS, reverse=True))
# Lines by which a process, or its launcher, dies. Whoever writes many others has survived.
_DYING: Final = re.compile(
    r"rror|WARN|raceback|ail(?:ed|ure)|exit|kill|closing signal|SIG[A-Z]{3}"
    r"|^(?:\s|frame #|#\d|[-=+|]{4}|\[?[IWE]\d{4})|^\S{0,20} {0,12}: "
)


@dataclass
class _Met:
    """A fault that one speaker met: the first line of it, and the last.

    `was_caught`: all its lines are those of exceptions that somebody caught.
    """

    fault: KnownFault
    text: str
    place: int
    last: str
    was_caught: bool


class KnownFaultLines(DumpReader):
    """Read the lines that a row of the table of known faults describes."""

    name = "known-faults"

    def recognises(self, dump: Dump) -> bool:
        """Look for a sign of trouble in what is not another kind of dump, which are many."""
        head = dump.data[:_HEAD]
        if head.startswith(_PICKLE) or (head.startswith(b"{") and _RECORDER in head):
            return False
        return any(sign in dump.data for sign in SIGNS)

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the faults of each speaker, each once, in the order of their first lines."""
        met: dict[Speaker, dict[str, _Met]] = {}
        log = open_log(dump)
        caught: frozenset[int] | None = None
        start = restarted_at(log)
        for line in log.lines_with(_words_in(dump.data)):
            fault = fault_of_line(line.text)
            if fault is not None and not _passes_on(log, line):
                if caught is None:
                    caught = lines_survived(log) if HEAD.encode() in log.data else frozenset()
                # What nobody signed may name its writer, as messages of process groups do.
                speaker = line.speaker
                if speaker == Speaker():
                    speaker = Speaker(rank_in(line.text))
                _note(
                    met.setdefault(speaker, {}),
                    fault,
                    line,
                    is_caught=line.place in caught or line.place < start,
                )
        if not met:
            return
        calm = dict(_calm_lines(dump, met))
        for speaker, faults in met.items():
            yield RankDump(
                rank=speaker.rank,
                local_rank=speaker.local_rank,
                events=tuple(
                    _event(speaker, each, dump.path, calm.get(each.last, 0))
                    for each in faults.values()
                ),
                path=dump.path,
                source=self.name,
            )


# NCCL passes a failure up through its functions: each may warn of it once more.
_WARNS: Final = re.compile(r"([\w.-]{1,80}:\d{1,9}:\d{1,9}) \[\d{1,3}\] .{0,80}?NCCL WARN ")
_PASSES_UP: Final = re.compile(
    r"([\w.-]{1,80}:\d{1,9}:\d{1,9}) \[\d{1,3}\] NCCL INFO \S{1,60}:\d{1,5} -> \d"
)
_MOST_PASSED: Final = 8


def _passes_on(log: Log, line: PlacedLine) -> bool:
    """Say whether a warning of NCCL only passes on another known fault, of which it warned last."""
    own = _WARNS.search(line.text)
    start = line.place
    for _ in range(_MOST_PASSED if own is not None else 0):
        start, end = log.before(start)
        text = log.text(start, end)
        if inner := _WARNS.search(text):
            return own is not None and inner[1] == own[1] and fault_of_line(text) is not None
        passed = _PASSES_UP.search(text)
        is_blank = not any(c.isalpha() for c in text.rpartition(">")[2])
        if start == 0 or not (is_blank or (own and passed and passed[1] == own[1])):
            return False
    return False


def _words_in(data: bytes) -> list[bytes]:
    """Return the words of the table that a log holds."""
    if data.startswith(_WIDE):
        return list(_WORDS)  # text of two bytes a character, which `lines_with` recodes
    return sorted({match.group() for match in _ANY_WORD.finditer(data)})


def _note(faults: dict[str, _Met], fault: KnownFault, line: PlacedLine, *, is_caught: bool) -> None:
    known = faults.get(fault.id)
    if known is not None and (is_caught or not known.was_caught):
        known.last = line.text
    elif known is not None or len(faults) < MOST_FAULTS:
        faults[fault.id] = _Met(fault, line.text, line.place, line.text, is_caught)


def _calm_lines(dump: Dump, met: dict[Speaker, dict[str, _Met]]) -> Iterator[tuple[str, int]]:
    """Yield for the last line of each fault how many calm lines its speaker wrote after it."""
    last = {each.last for faults in met.values() for each in faults.values()}
    for _, lines in streams(dump):
        after: dict[str, int] = {}
        num_calm = 0
        for line in lines():
            if line in last:
                after[line] = num_calm
            elif after and _DYING.search(line) is None:
                num_calm += 1
        for line, before in after.items():
            yield line, num_calm - before


def _event(speaker: Speaker, met: _Met, path: str, num_calm: int) -> FaultLogged:
    return FaultLogged(
        rank=UNKNOWN_RANK if speaker.rank is None else speaker.rank,
        seq=-1,
        time_ns=0,
        fault=met.fault.id,
        text=met.text.strip()[:LONGEST_TEXT],
        file=path,
        place=met.place,
        was_survived=met.was_caught or (met.fault.where != "kernel" and num_calm >= SURVIVED_AFTER),
    )
