"""Read what a stranger's context names: regular files only, bounded, never waited for."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final, cast

from distdiag.events.errors import DamagedFileError
from distdiag.record.regular_file import open_regular, read_all

HEAD_BYTES: Final = 8 << 20
TAIL_BYTES: Final = 24 << 20
"""Of a longer text its beginning and its end are looked at: settings come first, errors last."""
MOST_FILES: Final = 2_000
"""So many files of one folder are taken."""
MOST_FOLDERS: Final = 20_000
_LONGEST_LINE: Final = 4_000
"""Longer lines are data, not messages; what stands behind is not searched."""
_FOREIGN: Final = ("/proc", "/sys", "/dev")
"""What looks like a file there is a door to the kernel."""
_CHUNK: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_WIDE: Final = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines of a text that follow one another; the first has the number `first`, from 1."""

    first: int
    lines: tuple[str, ...]


def read_whole(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        DamagedFileError: it is not there, no regular file, larger than that, or cannot be read.

    """
    with _opened(path) as file:
        try:
            return read_all(file, path, most_bytes)
        except OSError as error:
            raise DamagedFileError(f"{path}: {error.strerror}") from None


def read_pieces(path: Path) -> tuple[Piece, ...]:
    """Return the lines of a text, plain or gzipped; of a long one its beginning and its end.

    A file that is no text has none.

    Raises:
        DamagedFileError: it is not there, no regular file, or cannot be read.

    """
    with _opened(path) as file:
        head = file.read(2)
        file.seek(0)
        if head != _GZIP:
            return _pieces(file)
        try:
            return _pieces(cast(BinaryIO, gzip.GzipFile(fileobj=file)), is_packed=True)
        except (OSError, EOFError, zlib.error) as error:
            raise DamagedFileError(f"{path}: a damaged gzip file: {error}") from None


def _opened(path: Path) -> BufferedReader:
    """Open a regular file, and nothing that could make the reader wait."""
    try:
        if any(str(path.resolve()).startswith(f"{root}/") for root in _FOREIGN):
            raise DamagedFileError(f"{path}: not a regular file")
        return open_regular(path)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DamagedFileError(f"{path}: cannot be read: {reason}") from None


def _pieces(file: BinaryIO, *, is_packed: bool = False) -> tuple[Piece, ...]:
    head = file.read(HEAD_BYTES)
    encoding = _WIDE.get(head[:2])
    if encoding is None and b"\0" in head[:_CHUNK]:
        return ()
    if encoding is not None:
        return (Piece(1, _lines(head[2:].decode(encoding, "replace"))),)
    if len(head) < HEAD_BYTES:
        return (Piece(1, _lines(head.decode("utf-8-sig", "replace"))),)
    return _head_and_tail(file, head, 1 << 30 if is_packed else 1 << 40)


def _head_and_tail(file: BinaryIO, head: bytes, most_bytes: int) -> tuple[Piece, ...]:
    """Read on to the end, and keep the last lines with their numbers."""
    kept: list[bytes] = []
    num_kept, num_lines, num_read = 0, head.count(b"\n"), len(head)
    while (chunk := file.read(_CHUNK)) and num_read < most_bytes:
        num_read += len(chunk)
        kept.append(chunk)
        num_kept += len(chunk)
        while num_kept > TAIL_BYTES:
            gone = kept.pop(0)
            num_kept -= len(gone)
            num_lines += gone.count(b"\n")
    tail = b"".join(kept)
    if num_read == len(head) + len(tail):
        return (Piece(1, _lines((head + tail).decode("utf-8-sig", "replace"))),)
    torn, _, tail = tail.partition(b"\n")
    return (
        Piece(1, _lines(head.decode("utf-8-sig", "replace"))),
        Piece(num_lines + torn.count(b"\n") + 2, _lines(tail.decode("utf-8", "replace"))),
    )


def _lines(text: str) -> tuple[str, ...]:
    """Return the lines. A carriage return within one, as bars draw, leaves what was drawn last."""
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return tuple(_shown(line) for line in lines)


def _shown(line: str) -> str:
    line = line.removesuffix("\r")
    if "\r" in line:
        line = line.rpartition("\r")[2]
    return line[:_LONGEST_LINE]


def files_below(folder: Path, ending: str = "") -> Iterator[Path]:
    """Yield the files of a folder with such an ending, in order; hidden folders are left out."""
    num_files = 0
    for num_folders, (where, folders, files) in enumerate(os.walk(folder), 1):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__")))
        for name in sorted(files):
            if name.endswith(ending):
                num_files += 1
                yield Path(where, name)
            if num_files >= MOST_FILES:
                return
        if num_folders >= MOST_FOLDERS:
            return
