"""Large files of text: read whole up to a limit, and beyond it the parts that tell of a failure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from distdiag.dumps.files import Limits, open_any
from distdiag.dumps.launchers.endings import ROWS
from distdiag.dumps.logs.group_messages import WORDS
from distdiag.dumps.logs.known_fault_lines import any_of
from distdiag.dumps.logs.tracebacks import HEAD
from distdiag.dumps.reading import Dump, LargeFile
from distdiag.findings.known_faults import known_faults

_CHUNK: Final = 16 << 20
_LONGEST_WORD: Final = 256
_BEFORE: Final = 8 << 10
"""So many bytes before a telling word are read: what names its writer, and the steps before."""
_AFTER: Final = 64 << 10
"""So many after it: a traceback, or the lines by which a process shows that it went on."""
_EDGES: Final = 1 / 16
"""This part of the limit is for either end of the file, which is read whatever it holds."""


class Loaded(NamedTuple):
    """A file in memory, and what is to be said of how it was read."""

    dump: Dump
    remark: str = ""


def load(file: LargeFile, limits: Limits | None = None) -> Loaded:
    """Read a file.

    Raises:
        OSError: it cannot be read.

    """
    most_bytes = (limits or Limits()).most_text
    with open_any(file.path) as opened:
        descriptor = opened.fileno()
        size = os.fstat(descriptor).st_size
        if size <= most_bytes:
            return Loaded(Dump(path=file.shown, data=_read(descriptor, 0, size)))
        spans = _kept(_telling(descriptor, size, int(most_bytes * _EDGES)), most_bytes)
        data = b"\n".join(_read(descriptor, start, end - start) for start, end in spans)
    remark = (
        f"all of its {size >> 20:,} MiB were searched for failures, and the {len(data) >> 20:,} "
        "MiB around them were read"
    )
    return Loaded(Dump(path=file.shown, data=data), remark)


def _read(descriptor: int, start: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(descriptor, size, start)):
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _telling(descriptor: int, size: int, edge: int) -> Iterator[tuple[int, int]]:
    """Yield what lies around the words that readers of logs look for, where it overlaps as one."""
    start, end = 0, edge
    for offset in range(0, size, _CHUNK):
        chunk = _read(descriptor, offset, _CHUNK + _LONGEST_WORD)
        for match in _words().finditer(chunk):
            place = offset + match.start()
            if place - _BEFORE > end:
                yield start, end
                start = place - _BEFORE
            end = max(end, min(size, place + _AFTER))
    if size - edge > end:
        yield start, end
        start = size - edge
    yield start, size


@lru_cache(maxsize=1)
def _words() -> re.Pattern[bytes]:
    words = {HEAD.encode(), b"exitcode", *WORDS, *(row.word for row in ROWS)}
    words |= {word.encode() for row in known_faults() for word in row.words}
    return any_of(sorted(words, reverse=True))


def _kept(spans: Iterator[tuple[int, int]], most_bytes: int) -> Sequence[tuple[int, int]]:
    """Return the spans, or those at the beginning and at the end if all would be too much."""
    first: list[tuple[int, int]] = []
    last: list[tuple[int, int]] = []
    room = most_bytes // 2
    for start, end in spans:
        if not last and (room := room - (end - start)) >= 0:
            first.append((start, end))
        else:
            last.append((start, end))
            while last[-1][1] - last[0][0] > most_bytes // 2 and len(last) > 1:
                del last[0]
    if last and last[0][1] - last[0][0] > most_bytes // 2:
        last[0] = (last[0][1] - most_bytes // 2, last[0][1])
    return [*first, *last]
