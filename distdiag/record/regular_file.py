"""Reads files that a stranger may have put there: no pipe, no device, and never too much."""

import errno
import os
import stat
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Final

_PIECE: Final = 1 << 18
LARGEST: Final = 16 << 20
"""So many bytes has a file of a run directory at most that is read whole; with thousands of ranks
the largest of them (who was launched, on which node) stays below one MiB."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file to be read from its beginning.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder.
        ValueError: no file can have such a name.

    """
    # Without O_NONBLOCK a pipe that nobody writes to is waited for.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most_bytes: int = LARGEST) -> bytes:
    """Return all that a file holds.

    Raises:
        OSError: as `open_regular` does, or it is larger.

    """
    with open_regular(path) as file:
        return read_all(file, path, most_bytes)


def read_all(file: BufferedIOBase, path: Path, most_bytes: int) -> bytes:
    """Return the rest of a file, with memory for what it holds and not for what it might hold.

    Raises:
        OSError: there is more, or it cannot be read.

    """
    data = bytearray()
    while piece := file.read(_PIECE):
        data += piece
        if len(data) > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes >> 20} MiB", str(path))
    return bytes(data)


def read_head(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, fewer if it has fewer.

    Raises:
        OSError: as `open_regular` does.

    """
    with open_regular(path) as file:
        return file.read(size)
