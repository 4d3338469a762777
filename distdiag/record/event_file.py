"""The append-only, memory-mapped event file of a rank, in segments of one size.

A segment is a header and records, each a length and its payload. The length is stored after the
payload, so a reader never sees half a record, whatever killed the writer. Disk space is reserved
before a segment is mapped, because a store into a hole on a full disk would kill the process.

A call has one byte more: its mark says how far it went, and costs a twentieth of a record.
"""

import errno
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from distdiag.record.private_file import Mapping, create_private
from distdiag.record.wire import FORGOTTEN, MAX_RECORD

MAGIC: Final = b"ddevnt02"
HEADER: Final = struct.Struct("<8sii")
LENGTH: Final = struct.Struct("<I")
START: Final = 16
MARKED: Final = 1 << 31
"""This bit of a length says that a mark follows the payload."""


NO_PLACE: Final = -1
_ROOM: Final = 9
"""A record needs so many bytes beside its payload, with the length of the one after it."""

ISSUED: Final = 1
WAITED: Final = 2
"""Marks: the place of a state in `STATES`, plus one."""

SEGMENT_BYTES: Final = 1 << 20
KEPT_SEGMENTS: Final = 64
"""So many segments stay on disk for each rank by default, the first one and the newest."""


def segment_path(folder: Path, rank: int, index: int) -> Path:
    """Return where a segment of a rank lies."""
    return folder / f"rank-{rank}.{index:06d}.events"


class EventWriter:
    """Append records from any thread without waiting for another one.

    A thread that finds the file busy leaves its record in a queue, which the thread that holds the
    file empties before it lets go: nobody waits, and no record is lost.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        on_forget: Callable[[], None],
        segment_bytes: int = SEGMENT_BYTES,
        kept_segments: int = KEPT_SEGMENTS,
    ) -> None:
        """Create the first segment; at most so many are kept, that one and the newest.

        Every segment begins with all definitions so far, so that it can be read alone. When they
        take more than half of it, they are dropped and `on_forget` says that they must come again.

        Raises:
            OSError: there is no room, or the folder cannot be written.

        """
        self._folder = folder
        self._rank = rank
        self._on_forget = on_forget
        self._definitions: list[bytes] = []
        self._definition_bytes = 0
        self._segment_bytes = segment_bytes
        self._kept_segments = kept_segments
        self._index = 0
        self._busy = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._mapping = self._open_segment(0)
        self._memory = self._mapping.memory
        # One value, because another thread may change segments while a mark is set.
        self._marks = (0, self._memory)
        self._offset = START
        self.stopped: OSError | None = None

    def define(self, payload: bytes) -> None:
        """Write a record that later ones refer to, in this segment and in those that follow."""
        self._definitions.append(payload)
        self._definition_bytes += len(payload) + 4
        self.append(payload)

    def abandon(self) -> None:
        """Write nothing from now on and let go of the file: it belongs to the parent process."""
        self.stopped = OSError(errno.EBADF, "the event file belongs to the parent process")
        self._memory = memoryview(bytearray(1))
        self._marks = (-1, self._memory)

    def append_call(self, payload: bytes) -> int:
        """Write the record of a call; return the place of its mark, or `NO_PLACE`."""
        place = NO_PLACE
        if not self._queue and self._busy.acquire(False):
            try:
                place = self._write(payload, MARKED)
            finally:
                self._busy.release()
            if self._queue:
                self._empty_queue()
        else:
            self.append(payload)
        return place

    def mark(self, place: int, state: int) -> bool:
        """Say how far a call went, from 1 on; return False if that must be a record instead."""
        index, memory = self._marks
        if place < 0 or place // self._segment_bytes != index:
            return False
        try:
            memory[place % self._segment_bytes] = state
        except ValueError:  # another thread has just closed this segment
            return False
        return True

    def append(self, payload: bytes) -> None:
        """Write one record, or leave it to the thread that is writing."""
        if not self._queue and self._busy.acquire(False):
            try:
                self._write(payload)
            finally:
                self._busy.release()
            if not self._queue:
                return
        else:
            self._queue.append(payload)
        self._empty_queue()

    def _empty_queue(self) -> None:
        queue, busy = self._queue, self._busy
        # Taken again after release: a record may have been queued between the two.
        while queue and busy.acquire(False):
            try:
                while queue:
                    self._write(queue.popleft())
            finally:
                busy.release()

    def _write(self, payload: bytes, marked: int = 0) -> int:
        """Write a record; return the place of its mark, or `NO_PLACE` if it was not written."""
        if self.stopped is not None:
            return NO_PLACE
        size = len(payload)
        offset = self._offset
        if offset + size + _ROOM > self._segment_bytes:
            if size > MAX_RECORD // 2 or not self._next_segment():
                return NO_PLACE
            offset = self._offset
            if offset + size + _ROOM > self._segment_bytes:
                return NO_PLACE  # the definitions have left too little room for this one
        end = offset + 4 + size
        memory = self._memory
        memory[offset + 4 : end] = payload
        memory[offset : offset + 4] = (size | marked).to_bytes(4, "little")
        self._offset = end + 1 if marked else end
        return self._index * self._segment_bytes + end

    def _next_segment(self) -> bool:
        try:
            mapping = self._open_segment(self._index + 1)
        except OSError as error:
            self.stopped = error
            return False
        self._index += 1
        before, self._mapping = self._mapping, mapping
        self._memory = mapping.memory
        self._marks = (self._index, mapping.memory)
        before.close()
        self._offset = START
        if self._index >= self._kept_segments:
            oldest = self._index - self._kept_segments + 1
            segment_path(self._folder, self._rank, oldest).unlink(missing_ok=True)
        self._repeat_definitions()
        return True

    def _repeat_definitions(self) -> None:
        definitions = self._definitions
        if self._definition_bytes > self._segment_bytes // 2:
            self._definitions, self._definition_bytes = [], 0
            self._on_forget()
            self._write(FORGOTTEN)
            return
        for payload in definitions:
            self._write(payload)

    def _open_segment(self, index: int) -> Mapping:
        path = segment_path(self._folder, self._rank, index)
        descriptor = create_private(path)
        try:
            os.posix_fallocate(descriptor, 0, self._segment_bytes)
            mapping = Mapping(descriptor, self._segment_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        HEADER.pack_into(mapping.memory, 0, MAGIC, self._rank, index)
        return mapping
