"""What a node's monitor itself saw, on disk: stacks, deaths, and what could not be observed.

The file holds records one after the other, each a length (4 bytes, the lowest first) and an event
in its MessagePack form. It is appended to and never rewritten.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Heartbeat
from distdiag.record.private_file import open_private
from distdiag.record.wire import Canon, EventDecoder, encode

MOST_BYTES: Final = 64 << 20
"""Beyond this size nothing is written any more."""
MOST_EVENT_BYTES: Final = 32 << 20
_LENGTH: Final = struct.Struct("<I")


class Journal:
    """Append the events that a monitor made. A full disk loses them and nothing else."""

    def __init__(self, path: Path) -> None:
        """Create the file, readable by the owner only, or append to it."""
        self.stopped: OSError | None = None
        self._num_bytes = 0
        try:
            self._descriptor = open_private(path, os.O_WRONLY | os.O_APPEND)
            self._num_bytes = os.fstat(self._descriptor).st_size
        except OSError as error:
            self.stopped = error

    def write(self, event: Event) -> None:
        """Write one event down; heartbeats are left out, the status pages have the last ones."""
        if isinstance(event, Heartbeat) or self.stopped or self._num_bytes > MOST_BYTES:
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


def read_journal(path: Path, canon: Canon) -> Iterator[Event]:
    """Yield the events of a journal; a record that was cut off at the end is left out.

    Raises:
        DamagedFileError: a record makes no sense.
        FileNotFoundError: there is no journal.

    """
    decoder = EventDecoder(-1, canon)
    with path.open("rb") as file:
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
