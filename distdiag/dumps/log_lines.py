"""The lines of a log to which several ranks wrote, each with the rank that the launcher named."""

from __future__ import annotations

import heapq
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from distdiag.dumps.reading import Dump

LONGEST_LINE: Final = 1 << 16
"""So many bytes of a line are read."""

_LINE: Final = re.compile(rb"[^\r\n]+")
_ESCAPES: Final = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# ``[rank3]: `` comes from torch's own hook and from its log lines, after whatever else was added.
_RANK: Final = re.compile(rb"\[rank(\d{1,6})\]: ?")
_RANK_WITHIN: Final = 128
# ``[default3]:`` is what torchrun --tee puts before a line: a role and a local rank.
_TEE: Final = re.compile(rb"\[([A-Za-z_][A-Za-z_-]{0,40})(\d{1,6})\]:")
# mpirun --tag-output
_MPI: Final = re.compile(rb"\[\d{1,9},(\d{1,6})\]<std(?:out|err)>: ?")
# srun --label, only where nearly all lines have it
_SRUN: Final = re.compile(rb" {0,6}(\d{1,6}): ?")
_NUM_PROBED: Final = 200
_HEAD: Final = 256


class Speaker(NamedTuple):
    """Whose line it is, as far as the line says."""

    rank: int | None = None
    local_rank: int | None = None


class Line(NamedTuple):
    """One line without its prefix, colours and control characters."""

    speaker: Speaker
    text: str


class Stream(NamedTuple):
    """All lines of one speaker, in order, decoded when they are asked for."""

    speaker: Speaker
    lines: Callable[[], Iterator[str]]


def lines_with(dump: Dump, words: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines that hold one of the words, without a look at the others.

    A word that begins with a line feed stands at the beginning of a line.
    """
    data = _as_utf8(dump.data)
    prefixes = _Prefixes(data)
    position = 0
    for place in heapq.merge(*(_places(data, word) for word in words)):
        if place < position:
            continue  # a line with several of the words
        breaks = (data.rfind(end, position, place) for end in (b"\n", b"\r"))
        match = _LINE.match(data, max(position, *(at + 1 for at in breaks)))
        assert match is not None  # the word's last byte
        start, position = match.span()
        speaker, start = prefixes.read(start, position)
        yield Line(speaker, _text(data, start, position))


def streams(dump: Dump) -> tuple[Stream, ...]:
    """Return the lines of each speaker apart; empty lines are left out.

    A carriage return ends a line, too, as those of progress bars do.
    Where a local rank is known to be one rank only, its other lines are that rank's, too.
    """
    data = _as_utf8(dump.data)
    prefixes = _Prefixes(data)
    spans: dict[Speaker, array[int]] = defaultdict(lambda: array("Q"))
    for match in _LINE.finditer(data):
        start, end = match.span()
        speaker, start = prefixes.read(start, end)
        spans[speaker].extend((start, end))
    ranks: dict[int | None, set[int]] = {}
    for rank, local_rank in spans:
        if rank is not None and local_rank is not None:
            ranks.setdefault(local_rank, set()).add(rank)
    return tuple(
        Stream(_resolved(speaker, ranks), _reader_of(data, places))
        for speaker, places in spans.items()
    )


def _places(data: bytes, word: bytes) -> Iterator[int]:
    """Yield where the last byte of each occurrence is."""
    place = data.find(word)
    while place >= 0:
        yield place + len(word) - 1
        place = data.find(word, place + len(word))


def _reader_of(data: bytes, places: array[int]) -> Callable[[], Iterator[str]]:
    def read() -> Iterator[str]:
        for at in range(0, len(places), 2):
            yield _text(data, places[at], places[at + 1])

    return read


def _resolved(speaker: Speaker, ranks: dict[int | None, set[int]]) -> Speaker:
    known = ranks.get(speaker.local_rank, set())
    if speaker.rank is None and len(known) == 1:
        return Speaker(next(iter(known)), speaker.local_rank)
    return speaker


def _as_utf8(data: bytes) -> bytes:
    """Recode UTF-16, which some shells write; all else is read as UTF-8, broken or not."""
    if data[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return data
    return data.decode("utf-16", errors="replace").encode("utf-8", errors="replace")


class _Prefixes:
    """What launchers put before the lines of one log."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._names_ranks = b"[rank" in data
        self._is_labelled = _is_labelled(data)

    def read(self, start: int, end: int) -> tuple[Speaker, int]:
        """Return who wrote a line and where its own text begins."""
        rank = local_rank = None
        # Most lines have no prefix, and logs have many lines.
        if self._is_labelled or self._data[start] in b"\x1b[":
            rank, local_rank, start = self._of_launcher(start, min(end, start + _HEAD))
        if self._names_ranks:
            place = self._data.find(b"[rank", start, min(end, start + _RANK_WITHIN))
            if place >= 0 and (match := _RANK.match(self._data, place, end)):
                rank, start = int(match[1]), match.end()
        return _speaker_of(rank, local_rank), start

    def _of_launcher(self, start: int, end: int) -> tuple[int | None, int | None, int]:
        data, rank, local_rank = self._data, None, None
        if match := _ESCAPES.match(data, start, end):
            start = match.end()
        if (self._is_labelled and (match := _SRUN.match(data, start, end))) or (
            match := _MPI.match(data, start, end)
        ):
            rank, start = int(match[1]), match.end()
        if (match := _TEE.match(data, start, end)) and match[1] != b"rank":
            local_rank, start = int(match[2]), match.end()
        return rank, local_rank, start


def _is_labelled(data: bytes) -> bool:
    probed = [
        data[match.start() : min(match.end(), match.start() + _HEAD)]
        for match in islice(_LINE.finditer(data), _NUM_PROBED)
    ]
    num_labelled = sum(_SRUN.match(line) is not None for line in probed)
    return num_labelled >= 2 and num_labelled >= 0.9 * len(probed)


@lru_cache(maxsize=4096)
def _speaker_of(rank: int | None, local_rank: int | None) -> Speaker:
    return Speaker(rank, local_rank)


def _text(data: bytes, start: int, end: int) -> str:
    line = data[start : min(end, start + LONGEST_LINE)]
    if b"\x1b" in line:
        line = _ESCAPES.sub(b"", line)
    text = line.decode("utf-8", errors="replace")
    return text if text.isprintable() else _CONTROLS.sub("", text)
