"""Follows the event file of a rank, while it is written and after its writer died."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.events.lifecycle import EventsLost
from distdiag.record.event_file import (
    HEADER,
    ISSUED,
    LENGTH,
    MAGIC,
    MARKED,
    START,
    WAITED,
    segment_path,
)
from distdiag.record.regular_file import open_regular
from distdiag.record.wire import MAX_RECORD, CallRecord, StateRecord, encode

_decode_call: Final = msgspec.msgpack.Decoder(CallRecord).decode
MOST_UNFINISHED: Final = 256
"""The marks of so many calls are followed; asynchronous calls are waited for in records."""


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A call whose mark may still rise, up to `last`; `offset` is where the mark lies."""

    record: CallRecord
    offset: int
    last: int
    mark: int = 0


class EventReader:
    """Follow the event file of one rank, also while it is written and after its writer died."""

    def __init__(self, folder: Path, rank: int, *, first: int = 0) -> None:
        """Begin with the segment of number `first`: each can be read without those before it."""
        self._folder = folder
        self._rank = rank
        self._index = first
        self._memory: mmap.mmap | None = None
        self._offset = START
        self._unfinished: deque[_Unfinished] = deque(maxlen=MOST_UNFINISHED)
        self._found: deque[bytes] = deque()

    def payloads(self, limit: int = 1 << 30) -> Iterator[bytes]:
        """Yield what was written since the last call, at most `limit` records.

        How far a call went comes as the `StateRecord` that its mark stands for. Where segments were
        dropped before they could be read, there is an `EventsLost`.

        Raises:
            DamagedFileError: a segment is not one of ours, or its records make no sense.

        """
        for _ in range(limit):
            payload = self._next()
            if payload is None:
                return
            yield payload

    def _next(self) -> bytes | None:
        while True:
            if self._found:
                return self._found.popleft()
            memory = self._memory or self._open()
            if memory is None:
                following = self._following()
                path = segment_path(self._folder, self._rank, self._index)
                # They are made in order: one that is absent beside a later one was dropped.
                if following is None or path.exists():
                    return None
                self._move_on(following, following - self._index)
                continue
            if self._look(memory):
                continue
            following = self._following()
            if following is None:
                return None
            # The writer has moved on, so this segment is final; it may have grown since we looked.
            if self._look(memory):
                continue
            memory.close()
            self._move_on(following, following - self._index - 1)

    def _move_on(self, following: int, num_lost: int) -> None:
        """Read that segment next; say how many before it were dropped unread."""
        self._unfinished.clear()
        self._memory, self._index, self._offset = None, following, START
        if num_lost:
            now_ns = time.monotonic_ns()
            lost = EventsLost(rank=self._rank, seq=-1, time_ns=now_ns, num_segments=num_lost)
            self._found.append(encode(lost))

    def _look(self, memory: mmap.mmap) -> bool:
        """Take the next record and what marks say; return whether there was anything."""
        # The record first: marks that its writer set before it are then there to be seen.
        record = self._record(memory)
        for call in tuple(self._unfinished):
            self._read_mark(memory, call)
        if record is not None:
            payload, is_marked = record
            self._found.append(payload)
            if is_marked:
                self._follow(memory, payload)
        return bool(self._found)

    def _follow(self, memory: mmap.mmap, payload: bytes) -> None:
        with suppress(*UNDECODABLE):  # who decodes the record will say so
            record = _decode_call(payload)
            # That an asynchronous call was waited for is a record of its own.
            last = ISSUED if record.is_async else WAITED
            self._unfinished.append(_Unfinished(record, self._offset - 1, last))
            self._read_mark(memory, self._unfinished[-1])

    def _read_mark(self, memory: mmap.mmap, call: _Unfinished) -> None:
        mark = memory[call.offset]
        if mark <= call.mark:
            return
        record = call.record
        for state in range(call.mark, min(mark, WAITED)):
            self._found.append(
                encode(StateRecord(record.seq, record.time_ns, record.step, record.seq, state))
            )
        call.mark = mark
        if mark >= call.last:
            self._unfinished.remove(call)

    def _record(self, memory: mmap.mmap) -> tuple[bytes, bool] | None:
        if self._offset + 4 > len(memory):
            return None
        (length,) = LENGTH.unpack_from(memory, self._offset)
        if length == 0:
            return None
        size, is_marked = length & ~MARKED, length >= MARKED
        end = self._offset + 4 + size
        if size > MAX_RECORD or end + is_marked > len(memory):
            raise DamagedFileError(
                f"{segment_path(self._folder, self._rank, self._index)}: record at byte "
                f"{self._offset} claims {size} bytes"
            )
        payload = memory[self._offset + 4 : end]
        self._offset = end + is_marked
        return payload, is_marked

    def _following(self) -> int | None:
        if segment_path(self._folder, self._rank, self._index + 1).exists():
            return self._index + 1
        prefix = f"rank-{self._rank}."
        later = [
            int(path.name.split(".")[1])
            for path in self._folder.glob(f"{prefix}*.events")
            if path.name.split(".")[1].isdigit()
        ]
        return min((index for index in later if index > self._index), default=None)

    def _open(self) -> mmap.mmap | None:
        path = segment_path(self._folder, self._rank, self._index)
        try:
            with open_regular(path) as file:
                header = file.read(START)
                if len(header) < START or header == bytes(START):
                    return None  # created a moment ago
                magic, _, _ = HEADER.unpack(header)
                if magic != MAGIC:
                    raise DamagedFileError(
                        f"{path} is not an event file of this version of distdiag"
                    )
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedFileError(f"{path} cannot be read: {error.strerror}") from None
        return self._memory
