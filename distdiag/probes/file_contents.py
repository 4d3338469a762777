"""What small files hold, so that writing the same again can be told from a race."""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from typing import Final

from distdiag.event import FileContent
from distdiag.probes.in_place import as_it_was

LARGEST_CONTENT: Final = 1 << 16
LARGEST_MOVED: Final = 1 << 22
BLOCK: Final = 1 << 12
_CHUNK: Final = 1 << 20


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


def digest_of(path: str) -> str | None:
    """Return a digest of a regular file of moderate size, None if it is anything else."""
    descriptor = _open_to_read(path, os.O_NOFOLLOW)
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_MOVED:
            return None
        digest = hashlib.blake2b(digest_size=16)
        while chunk := os.read(descriptor, _CHUNK):
            digest.update(chunk)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _open_to_read(path: str, flags: int = 0) -> int | None:
    try:
        # Never waits, should somebody have made a pipe of it.
        return as_it_was(os.open)(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError:
        return None
