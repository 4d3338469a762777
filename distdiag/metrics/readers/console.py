"""Text that runs print: its lines are given to the formats whose signs they hold."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

from distdiag.dumps.log_prefixes import NOBODY, Speaker, speaker_in, time_in, untimed
from distdiag.dumps.log_text import unwrapped
from distdiag.metrics.readers.lines import Follow, LineFormat, Parsed
from distdiag.metrics.readers.records import Collector, Record
from distdiag.metrics.readers.sources import Block

LONGEST_LINE: Final = 1 << 16
"""So many bytes of a line are read, as elsewhere in the reading of logs."""
_LONGEST_PREFIX: Final = 256
_HEAD_BYTES: Final = 1 << 16
_RANK: Final = re.compile(r"\[rank(\d{1,6})\]:")

# What trainers and launchers print once, when they begin or begin again.
BANNERS: Final = (
    b"***** Running training *****",  # transformers
    b"[before the start of training step]",  # Megatron-LM
    b"setting random seeds to ",  # Megatron-LM
    b"Starting job: ",  # torchtitan
    b"Training starts at step ",  # torchtitan
    b"Resuming training from ",  # nanoGPT and others
    b"Initializing a new model from scratch",  # nanoGPT
    b"Restoring states from the checkpoint path at ",  # lightning
    b"Restarting worker group",  # torchelastic
    b"restarting worker group",
)

Say = Callable[[str, int], None]


class Console:
    """The lines of one text."""

    def __init__(self, formats: Sequence[LineFormat], collector: Collector, say: Say) -> None:
        """Read lines into the collector; `say` gets what is wrong with a line, and its number."""
        self._say = say
        self._formats = formats
        self._collector = collector
        self._is_wrapped: bool | None = None
        self._open: tuple[Follow, Parsed, Speaker, str] | None = None
        self._last: dict[Speaker, Parsed] = {}

    def feed(self, block: Block) -> None:
        """Read the lines of a block."""
        if self._is_wrapped is None:
            head = block.data[:_HEAD_BYTES]
            self._is_wrapped = unwrapped(head) is not head
        data = block.data
        if self._is_wrapped:
            lines = data.split(b"\n")
            inner = [unwrapped(line).rstrip(b"\n") for line in lines]
            # Lines of one record keep one number: they are parted by carriage returns.
            data = b"\n".join(text.replace(b"\n", b"\r") for text in inner)
        self._read(data, block.first)

    def _read(self, data: bytes, number: int) -> None:
        formats = [each for each in self._formats if any(a in data for a in each.anchors)]
        anchors = [anchor for each in formats for anchor in each.anchors]
        begin = self._followed(data, 0, number) if self._open else 0
        counted = 0
        for start, end in _lines_with(data, [*anchors, *BANNERS], begin):
            if start < begin:
                continue  # it followed another one
            number += data.count(b"\n", counted, start)
            counted = start
            line = data[start : min(end, start + LONGEST_LINE)]
            if not self._line(line, formats, number):
                self._banner(line)
            begin = end
            if self._open:
                begin = self._followed(data, end, number)

    def _line(self, line: bytes, formats: Sequence[LineFormat], number: int) -> bool:
        text = ""
        for each in formats:
            if not any(anchor in line for anchor in each.anchors):
                continue
            text = text or line.decode("utf-8", "replace")
            parsed = each.read(text)
            if parsed is not None and parsed.why:
                self._say(parsed.why, number)
                return True
            if parsed is not None:
                self._add(each.name, parsed, text[: parsed.start], number)
                return True
        return False

    def _add(self, name: str, parsed: Parsed, prefix: str, number: int) -> None:
        speaker = Speaker(parsed.rank) if parsed.rank is not None else speaker_of(prefix)
        if parsed.is_repeated:
            last = self._last.get(speaker)
            if last and (last.step, last.epoch, last.values) == (
                parsed.step,
                parsed.epoch,
                parsed.values,
            ):
                return
            self._last[speaker] = parsed
        time = parsed.time or _time(prefix[:_LONGEST_PREFIX])
        self._collector.add(name, _record(parsed, number, time), speaker)
        self._open = (parsed.follow, parsed, speaker, name) if parsed.follow else None

    def _followed(self, data: bytes, place: int, number: int) -> int:
        """Read the lines that belong to the one before; return where the next one begins."""
        assert self._open is not None
        follow, head, speaker, name = self._open
        for match in _LINE.finditer(data, place):
            line = match[0][:LONGEST_LINE]
            values = follow(line.decode("utf-8", "replace"))
            if values is None:
                self._open = None
                return match.start()
            at = number + data.count(b"\n", place, match.start())
            self._collector.add(name, _record(head, at, 0.0, values), speaker)
        return len(data)

    def _banner(self, line: bytes) -> None:
        for banner in BANNERS:
            place = line.find(banner)
            if place >= 0:
                prefix = line[:place].decode("utf-8", "replace")
                self._collector.begin(speaker_of(prefix))


_LINE: Final = re.compile(rb"[^\r\n]+")


def _record(
    parsed: Parsed, number: int, time: float, values: Mapping[str, float] | None = None
) -> Record:
    return Record(
        parsed.values if values is None else values,
        parsed.step,
        number,
        parsed.epoch,
        parsed.per_epoch,
        time,
        parsed.is_weak,
    )


def _lines_with(data: bytes, words: Sequence[bytes], begin: int) -> Iterator[tuple[int, int]]:
    """Yield where the lines begin and end that hold one of the words, without the others."""
    position = begin
    for place in heapq.merge(*(_places(data, word, begin) for word in words if word in data)):
        if place < position:
            continue  # a line with several of the words
        start = max(data.rfind(b"\n", position, place), data.rfind(b"\r", position, place)) + 1
        match = _LINE.match(data, max(position, start))
        if match is None:
            continue
        position = match.end()
        yield match.span()


def _places(data: bytes, word: bytes, begin: int) -> Iterator[int]:
    place = data.find(word, begin)
    while place >= 0:
        yield place
        place = data.find(word, place + len(word))


def speaker_of(prefix: str) -> Speaker:
    """Return whom a prefix names, whatever bar of progress stands in it."""
    if not prefix or prefix.isspace():
        return NOBODY
    if "%|" in prefix or len(prefix) > _LONGEST_PREFIX:
        match = _RANK.search(prefix)
        return Speaker(int(match[1])) if match else NOBODY
    return _speaker(untimed(prefix))


_speaker: Callable[[str], Speaker] = lru_cache(maxsize=4096)(speaker_in)


@lru_cache(maxsize=4096)
def _time(prefix: str) -> float:
    """Return the time in a prefix, in seconds since 1970, or 0."""
    if "20" not in prefix:
        return 0.0
    with suppress(ValueError, OverflowError):
        return time_in(prefix.encode("utf-8", "replace")) / 1e9
    return 0.0
