"""Text of any size as blocks of whole lines: packed or not, in UTF-8 or UTF-16, cut or damaged."""

from __future__ import annotations

import codecs
import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distdiag.dumps.files import Budget, Limits, MeteredStream
from distdiag.dumps.log_lines import ESCAPES
from distdiag.dumps.log_text import encoding_of
from distdiag.events.errors import DamagedFileError
from distdiag.record.regular_file import open_regular

CHUNK: Final = 1 << 20
LONGEST_LINE: Final = 1 << 20
"""So many bytes of a line are read; the rest is passed over. Rows of a table are the longest."""
_GZIP: Final = b"\x1f\x8b"
_DAMAGE: Final = (EOFError, OSError, ValueError)

Read = Callable[[int], bytes]


class UnreadableError(DamagedFileError):
    """A file that cannot be read, or not any further; says why in a few words."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a text, without colours and NULs.

    `first` is the number of the first line, from 1. A carriage return parts lines that have one
    number, as those of progress bars do.
    """

    data: bytes
    first: int


@contextmanager
def opened(path: Path) -> Iterator[Read]:
    """Open a file, unpack it if it is packed, and hand out what reads it.

    Raises:
        UnreadableError: it is no regular file, cannot be opened, or is damaged.

    """
    try:
        file = open_regular(path)
    except (OSError, ValueError) as error:
        raise UnreadableError(f"cannot be opened: {getattr(error, 'strerror', error)}") from None
    with file:
        is_packed = file.read(2) == _GZIP
        file.seek(0)
        if not is_packed:
            yield guarded(file.read)
            return
        size = os.fstat(file.fileno()).st_size
        with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
            budget = Budget(Limits(most_unpacked=1 << 62))
            yield guarded(MeteredStream(unpacked.read1, size, budget).read)


def guarded(read: Read) -> Read:
    """Return a function that reads and says in one way what is damaged."""

    def read_or_say(size: int) -> bytes:
        try:
            return read(size)
        except DamagedFileError as error:
            raise UnreadableError(str(error)) from None
        except _DAMAGE as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UnreadableError(f"is damaged, and read only so far: {reason}") from None

    return read_or_say


def blocks(read: Read) -> Iterator[Block]:
    """Yield the text in blocks that end with a line; memory holds two of them at a time.

    What was read before damage is yielded before the damage is told.

    Raises:
        UnreadableError: it cannot be read any further.

    """
    rest, number, is_long = b"", 1, False
    damage: list[UnreadableError] = []
    for text in _texts(read, damage):
        data = rest + text
        if is_long:  # the rest of a line that was too long
            end = data.find(b"\n")
            if end < 0:
                rest = b""
                continue
            data, is_long = data[end:], False
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        rest = data[end:]
        if end:
            yield Block(_clean(data[:end]), number)
            number += data.count(b"\n", 0, end)
        if len(rest) > LONGEST_LINE:
            yield Block(_clean(rest[:LONGEST_LINE]), number)
            rest, is_long = b"", True
    if rest:
        yield Block(_clean(rest), number)
    if damage:
        raise damage[0]


def _texts(read: Read, damage: list[UnreadableError]) -> Iterator[bytes]:
    """Yield the file as UTF-8; damage ends it."""
    decode = None
    try:
        chunk = read(CHUNK)
        if encoding := encoding_of(chunk[:4096]):
            decode = codecs.getincrementaldecoder(encoding)("replace").decode
        while chunk:
            yield decode(chunk).encode("utf-8", "replace") if decode else chunk
            chunk = read(CHUNK)
    except UnreadableError as error:
        damage.append(error)


def _clean(data: bytes) -> bytes:
    if b"\x1b" in data:
        data = ESCAPES.sub(b"", data)
    if b"\0" in data:  # a log that was truncated while it was written
        data = data.replace(b"\0", b"")
    return data.replace(b"\b", b"\r") if b"\b" in data else data
