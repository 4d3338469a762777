"""Files of a run, made for their owner alone and kept without harm to the process that has them.

What is made here follows no link, and nobody else may read it, whatever the umask is. A training
script may close descriptors that it does not know (`os.closerange`), after which their numbers
belong to what it opens next. So nothing keeps a descriptor that can do without one, and what must
keep one asks before each use whether it is still its own.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

RESERVE_BYTES: Final = 512 << 10
"""Room for a report."""
_HIGHEST: Final = 4096
"""The kernel's table of descriptors has room up to the highest one: this many take 32 KiB."""
_TRIED: Final = 64
"""So far below the limit a free number is looked for."""


def create_private(path: Path, flags: int = os.O_RDWR) -> int:
    """Create a file that is not there yet, and return its descriptor.

    Raises:
        OSError: there is something (a link, even one that leads nowhere), or no room.

    """
    return _open(path, flags | os.O_EXCL)


def open_private(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a file that may be there already, but is no link; return its descriptor.

    Raises:
        OSError: it is a link, or cannot be written.

    """
    return _open(path, flags)


def _open(path: Path, flags: int) -> int:
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    # A umask takes bits away, from the owner as well.
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o600:
        with suppress(OSError):
            os.fchmod(descriptor, 0o600)
    return descriptor


def set_aside(path: Path, size: int) -> None:
    """Keep so much room of the disk as a file; where there is no room there is no such file."""
    try:
        descriptor = open_private(path)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError:
        path.unlink(missing_ok=True)


def make_private_folder(path: Path) -> None:
    """Make a folder for its owner alone, unless it is there; folders above it get the usual rights.

    Raises:
        OSError: it cannot be made, or in a folder that everybody may write to somebody else has
            put something in its place.

    """
    path = path.absolute()
    for folder in reversed(path.parents):
        with suppress(FileExistsError):  # a file in the way makes what is made below it fail
            if not folder.is_dir():
                _make_folder(folder, 0o777)
    _make_folder(path, 0o700)
    _refuse_strangers(path)


def _make_folder(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    now = stat.S_IMODE(path.stat().st_mode)
    if now & 0o700 != 0o700 or mode == 0o700 != now:
        path.chmod(mode if mode == 0o700 else now | 0o700)


def _refuse_strangers(path: Path) -> None:
    """Refuse links, and a folder itself, that others may have put in the way."""
    mine = (os.geteuid(), 0)
    for each in (path, *path.parents):
        found = each.lstat()
        is_open = each.parent.stat().st_mode & stat.S_IWOTH
        if not is_open or found.st_uid in mine:
            continue
        if stat.S_ISLNK(found.st_mode) or each == path:
            raise PermissionError(errno.EPERM, f"{each} was put there by another user")


def private_stream(path: Path) -> BinaryIO:
    """Return a file that is written from its beginning for as long as the script runs.

    Raises:
        OSError: it is a link, or cannot be written.

    """
    descriptor = KeptDescriptor(open_private(path, os.O_WRONLY | os.O_TRUNC))
    return os.fdopen(descriptor.number, "wb")


class Mapping:
    """A file in memory that the process shares with whoever reads it, without a descriptor.

    `mmap.mmap` keeps one for itself, and closes its number in the end, whosoever that is by then.
    """

    __slots__ = ("_address", "memory")

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the file; its descriptor may be closed.

        Raises:
            OSError: it cannot be mapped.

        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = libc.mmap(None, size, access, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address = address
        self.memory = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")

    def close(self) -> None:
        """Let go of the memory; whoever still writes to it gets a ValueError."""
        address, self._address = self._address, None
        if address is None:
            return
        size = len(self.memory)
        self.memory.release()
        ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def __del__(self) -> None:
        """Let go of the memory with the last one who has it."""
        try:
            self.close()
        except (AttributeError, BufferError, TypeError):
            return  # it was never mapped, or the interpreter ends


class KeptDescriptor:
    """A descriptor that stays open while the script runs, under a number that scripts hardly use.

    Few scripts close numbers beyond 256, and none opens so many files that it gets there soon.
    """

    def __init__(self, descriptor: int) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _HIGHEST if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST)
        self.number = descriptor
        with suppress(OSError, ValueError):
            self.number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, limit - _TRIED))
            os.close(descriptor)
        found = os.fstat(self.number)
        self._file = (found.st_dev, found.st_ino)

    @property
    def is_ours(self) -> bool:
        """Whether the number still stands for the same file."""
        try:
            found = os.fstat(self.number)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._file

    def close(self) -> None:
        """Close it, unless the script has."""
        if self.is_ours:
            os.close(self.number)
