"""What a node's monitor itself saw and did, on disk: stacks, deaths, and when it looked.

With it and the ranks' own event files an engine can be led through a run once more. The file holds
records one after the other, each a length (4 bytes, the lowest first) and an event in its
MessagePack form. It is appended to and never rewritten.

Heartbeats and polls are many, and nearly all of them are followed by nothing. They are kept in
memory and written before an event that tells that something has happened, and for a while after it.
"""

import os
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Heartbeat, Monitored
from distdiag.record.private_file import open_private
from distdiag.record.regular_file import open_regular
from distdiag.record.wire import EventDecoder, Interner, encode

MOST_BYTES: Final = 64 << 20
"""Beyond this size nothing is written any more."""
MOST_EVENT_BYTES: Final = 32 << 20
_LENGTH: Final = struct.Struct("<I")

AFTER_NS: Final = 3_000_000_000
"""What an event leads to is concluded within a few polls of the engine, 0.2 s each."""
BEAT_EVERY_NS: Final = 1_000_000_000
MOST_BEATS: Final = 60
"""The engine asks what a rank did in the last 30 s, or for as long as the user's threshold."""


class _Beats:
    """The heartbeats of one rank since it last moved that are not written yet."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._moved: Heartbeat | None = None
        self._since: deque[Heartbeat] = deque(maxlen=MOST_BEATS)

    def add(self, beat: Heartbeat) -> None:
        key = (beat.step, beat.num_batches, beat.num_backwards, beat.phase)
        if key != self._key:
            self._key, self._moved = key, beat
            self._since.clear()
            return
        since = self._since
        if len(since) > 1 and since[-1].time_ns - since[-2].time_ns < BEAT_EVERY_NS:
            since.pop()
        since.append(beat)

    def take(self) -> list[Heartbeat]:
        taken = [*([self._moved] if self._moved is not None else ()), *self._since]
        self._moved = None
        self._since.clear()
        return taken


class Journal:
    """Append the events that a monitor made. A full disk loses them and nothing else."""

    def __init__(self, path: Path) -> None:
        self.stopped: OSError | None = None
        self._num_bytes = 0
        self._beats: dict[int, _Beats] = {}
        self._look: Monitored | None = None
        self._now_ns = self._open_until_ns = 0
        try:
            self._descriptor = open_private(path, os.O_WRONLY | os.O_APPEND)
            self._num_bytes = os.fstat(self._descriptor).st_size
        except OSError as error:
            self.stopped = error

    def write(self, event: Event) -> None:
        """Write one event down, or keep it until one comes that must be written."""
        match event:
            case Heartbeat():
                self._beats.setdefault(event.rank, _Beats()).add(event)
                return
            case Monitored(act="looked"):
                self._now_ns, self._look = event.time_ns, event
                if self._now_ns <= self._open_until_ns:
                    self._write_kept()
                return
        self._write_kept()
        self._open_until_ns = self._now_ns + AFTER_NS
        self._append(event)

    def _write_kept(self) -> None:
        kept: list[Event] = [beat for beats in self._beats.values() for beat in beats.take()]
        if self._look is not None:
            kept.append(self._look)
            self._look = None
        for event in sorted(kept, key=lambda event: event.time_ns):
            self._append(event)

    def _append(self, event: Event) -> None:
        if self.stopped or self._num_bytes > MOST_BYTES:
            return
        payload = encode(event)
        record = _LENGTH.pack(len(payload)) + payload
        try:
            written = os.write(self._descriptor, record)
        except OSError as error:
            self.stopped = error
            return
        self._num_bytes += written
        if written < len(record):  # what follows would not be found behind half a record
            self.stopped = OSError("the disk is full")


def read_journal(path: Path, interner: Interner) -> Iterator[Event]:
    """Yield the events of a journal; a record that was cut off at the end is left out.

    Raises:
        DamagedFileError: a record makes no sense.
        FileNotFoundError: there is no journal.

    """
    decoder = EventDecoder(-1, interner)
    with open_regular(path) as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            if size > MOST_EVENT_BYTES:
                raise DamagedFileError(f"{path}: a record claims {size} bytes")
            payload = file.read(size)
            if len(payload) < size:
                return
            try:
                event = decoder.decode(payload)
            except DamagedFileError as error:
                raise DamagedFileError(f"{path}: {error}") from None
            if event is not None:
                yield event
