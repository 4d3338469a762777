"""The lines of a log to which several ranks wrote, each with the rank that its prefix names."""

from __future__ import annotations

import heapq
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from distdiag.dumps.log_prefixes import (
    Prefixes,
    Speaker,
    ranks_of_labels,
    ranks_of_processes,
    time_in,
)
from distdiag.dumps.log_text import joined, plain, signed
from distdiag.dumps.reading import Dump

__all__ = [
    "ESCAPES",
    "LONGEST_LINE",
    "Log",
    "Speaker",
    "Stream",
    "open_log",
    "streams",
]

LONGEST_LINE: Final = 1 << 16
"""So many bytes of a line are read."""

_LINE: Final = re.compile(rb"[^\r\n]+")
ESCAPES: Final = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
"""What terminals obey and nobody reads: colours, movements, titles."""
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Stream(NamedTuple):
    """All lines of one speaker, in order, decoded when they are asked for."""

    speaker: Speaker
    lines: Callable[[], Iterator[str]]


class PlacedLine(NamedTuple):
    """A line with its place in the file: those of other speakers stand before or behind it."""

    speaker: Speaker
    text: str
    place: int


class Log:
    """A log as text, with what was learned of its prefixes."""

    def __init__(self, dump: Dump) -> None:
        """Learn the prefixes; no line is read for good yet."""
        self.path = dump.path
        data = plain(dump).data
        if b"\x1b" in data:
            data = ESCAPES.sub(b"", data)
        self.data = joined(signed(data))
        self.prefixes = Prefixes(self.data)
        if cuts := self.prefixes.glued_heads():
            edges = [0, *cuts, len(self.data)]
            self.data = b"\n".join(self.data[a:b] for a, b in pairwise(edges))
            self.prefixes = Prefixes(self.data)
        self._spans: dict[Speaker, array[int]] = {}
        self._ranks: dict[str, int] | None = None
        self._places: dict[bytes, list[int]] = {}

    def lines_with(self, words: Iterable[bytes]) -> Iterator[PlacedLine]:
        """Yield the lines that hold one of the words, without a look at the others."""
        data = self.data
        position = 0
        for place in heapq.merge(*(_places(data, word) for word in words)):
            if place < position:
                continue  # a line with several of the words
            breaks = (data.rfind(end, position, place) for end in (b"\n", b"\r"))
            match = _LINE.match(data, max(position, *(at + 1 for at in breaks)))
            assert match is not None  # the word's last byte
            start, position = match.span()
            speaker, begin = self.prefixes.read(start, position)
            yield PlacedLine(self.named(speaker), _text(data, begin, position), start)

    def streams(self) -> dict[Speaker, array[int]]:
        """Return where the lines of each speaker begin and end, in turn."""
        if not self._spans:
            spans: dict[Speaker, array[int]] = defaultdict(lambda: array("Q"))
            read = self.prefixes.read
            for match in _LINE.finditer(self.data):
                start, end = match.span()
                speaker, start = read(start, end)
                spans[speaker].extend((start, end))
            self._spans = dict(spans)
        return self._spans

    def resolved(self, speaker: Speaker) -> Speaker:
        """Return the speaker with the rank that its other lines tell."""
        known = {
            other.rank
            for other in self.streams()
            if other.rank is not None
            and other.local_rank is not None
            and (other.local_rank, other.label) == (speaker.local_rank, speaker.label)
        }
        if speaker.rank is None and len(known) == 1:
            return Speaker(next(iter(known)), speaker.local_rank, speaker.label)
        return self.named(speaker)

    def named(self, speaker: Speaker) -> Speaker:
        """Return the speaker with the rank of its process, or that its label counts, if all do."""
        if not speaker.label or speaker.rank is not None or speaker.local_rank is not None:
            return speaker
        if self._ranks is None:
            self._ranks = ranks_of_processes(self.streams()) or ranks_of_labels(self.streams())
        return Speaker(self._ranks.get(speaker.label), None, speaker.label)

    def before(self, start: int) -> tuple[int, int]:
        """Return where the line above the one that begins here, or in it, begins and ends."""
        data = self.data
        end = max(data.rfind(each, 0, start) for each in (b"\n", b"\r"))
        begin = max(data.rfind(each, 0, max(end, 0)) for each in (b"\n", b"\r")) + 1
        return begin, max(end, begin)

    def places(self, word: bytes) -> list[int]:
        """Return where a word begins, in the order of the file."""
        if word not in self._places:
            self._places[word] = [end + 1 - len(word) for end in _places(self.data, word)]
        return self._places[word]

    def after(self, start: int) -> Iterator[str]:
        """Yield the lines after the one that begins here, whoever wrote them, as they stand."""
        lines = _LINE.finditer(self.data, start)
        next(lines, None)
        for match in lines:
            yield _text(self.data, *match.span())

    def text(self, start: int, end: int) -> str:
        """Return a part of a line as it is shown."""
        return _text(self.data, start, end)

    def time_ns(self, place: int) -> int:
        """Return the time since 1970 that the line at this place begins with, or 0."""
        start = max(self.data.rfind(end, 0, place) for end in (b"\n", b"\r")) + 1
        return time_in(self.data[start : max(place, start + 1)])


_last: list[tuple[bytes, Log]] = []


def open_log(dump: Dump) -> Log:
    """Return the log; readers of the same file, one after the other, share what was learned."""
    if not _last or _last[0][0] is not dump.data:
        _last[:] = [(dump.data, Log(dump))]
    return _last[0][1]


def streams(dump: Dump) -> tuple[Stream, ...]:
    """Return the lines of each speaker apart; empty lines are left out.

    A carriage return ends a line, too, as those of progress bars do.
    Where a local rank is known to be one rank only, its other lines are that rank's, too.
    """
    log = open_log(dump)
    return tuple(
        Stream(log.resolved(speaker), _reader_of(log, spans))
        for speaker, spans in log.streams().items()
    )


def _places(data: bytes, word: bytes) -> Iterator[int]:
    """Yield where the last byte of each occurrence is."""
    place = data.find(word)
    while place >= 0:
        yield place + len(word) - 1
        place = data.find(word, place + len(word))


def _reader_of(log: Log, spans: array[int]) -> Callable[[], Iterator[str]]:
    def read() -> Iterator[str]:
        for at in range(0, len(spans), 2):
            yield log.text(spans[at], spans[at + 1])

    return read


def _text(data: bytes, start: int, end: int) -> str:
    text = data[start : min(end, start + LONGEST_LINE)].decode("utf-8", errors="replace")
    return text if text.isprintable() else _CONTROLS.sub("", text)
