"""What small files hold, so that writing the same again can be told from a race."""

from __future__ import annotations

import os
import stat
import zlib
from typing import Final

from distdiag.event import FileContent

LARGEST_CONTENT: Final = 1 << 16
LARGEST_REPLACED: Final = 1 << 22
BLOCK: Final = 1 << 12
_CHUNK: Final = 1 << 20

# The probe puts its own in place of this.
_open = os.open


def content_of(path: str) -> FileContent | None:
    """Return what a small regular file holds now, None if it is anything else."""
    descriptor = _open_to_read(path)
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_CONTENT:
            return None
        data = os.read(descriptor, status.st_size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    blocks = (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))
    return FileContent(len(data), tuple(zlib.crc32(block) for block in blocks))


def replaces_same(origin: str, path: str) -> bool | None:
    """Say whether two files of moderate size are equal; None if there is nothing to compare."""
    try:
        mine, theirs = os.stat(origin), os.stat(path)
    except OSError:
        return None
    if not (stat.S_ISREG(mine.st_mode) and stat.S_ISREG(theirs.st_mode)):
        return None
    if mine.st_size != theirs.st_size:
        return False
    if mine.st_size > LARGEST_REPLACED:
        return None
    return _are_equal(origin, path)


def _are_equal(one: str, other: str) -> bool | None:
    descriptors = [each for each in map(_open_to_read, (one, other)) if each is not None]
    try:
        while len(descriptors) == 2:
            chunks = [os.read(descriptor, _CHUNK) for descriptor in descriptors]
            if chunks[0] != chunks[1] or not chunks[0]:
                return chunks[0] == chunks[1]
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return None


def _open_to_read(path: str) -> int | None:
    try:
        # Never waits, should somebody have made a pipe of it.
        return _open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
