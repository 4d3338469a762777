"""Which of the files that were opened for writing, or locked, are still open.

Nobody tells when a file is closed, and replacing what `open` returns would change the program. So
what was returned is remembered weakly and looked at before each event that could order the write.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Final

from distdiag.probes.patching.in_place import as_it_was
from distdiag.probes.untyped import Untyped

_DESCRIPTORS: Final = "/proc/self/fd"

IsOpen = Callable[[], bool]


class OpenFile:
    """A file that somebody has open: how to see that he still has, and what to do afterwards."""

    __slots__ = ("end", "is_lock", "is_open")

    def __init__(self, is_open: IsOpen, end: Callable[[], None], *, is_lock: bool = False) -> None:
        self.is_open = is_open
        self.end = end
        self.is_lock = is_lock


class OpenFiles:
    """The files of this process whose end is not known."""

    def __init__(self) -> None:
        self._files: list[OpenFile] = []

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._files)

    def add(self, file: OpenFile) -> None:
        """Remember a file until it is closed."""
        self._files.append(file)

    def remove(self, file: OpenFile) -> None:
        """Forget a file whose end was reported otherwise."""
        if file in self._files:
            self._files.remove(file)

    def settle(self) -> None:
        """Tell the ends of those that are closed by now."""
        # Taken away first: another thread that comes by meanwhile must not end them once more.
        files, self._files = self._files, []
        closed = []
        for file in files:
            if file.is_open():
                self._files.append(file)
            else:
                closed.append(file)
        for file in sorted(closed, key=_locks_last):
            file.end()


def _locks_last(file: OpenFile) -> bool:
    return file.is_lock


def file_is_open(file: Untyped) -> IsOpen:
    """Return what tells whether a file object is open, without keeping it alive."""
    reference = weakref.ref(file)

    def is_open() -> bool:
        living = reference()
        try:
            return living is not None and not living.closed
        except ValueError:  # its lower half was detached
            return False

    return is_open


def descriptor_is_open(descriptor: int) -> IsOpen:
    """Return what tells whether a descriptor still stands for the file that it does now."""
    identity = _identity(descriptor)

    def is_open() -> bool:
        return identity is not None and _identity(descriptor) == identity

    return is_open


def or_mapped(is_open: IsOpen, descriptor: int) -> IsOpen:
    """Return what tells whether a file is open or, after that, mapped.

    A mapping made by Python has a descriptor of its own, and writes on when the file is closed.
    """
    identity = _identity(descriptor)
    tests = [is_open]

    def still_open() -> bool:
        if tests[0]():
            return True
        other = _descriptor_of(identity)
        if other is None:
            return False
        tests[0] = descriptor_is_open(other)
        return True

    return still_open


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _descriptor_of(identity: tuple[int, int] | None) -> int | None:
    """Find an open descriptor of a file."""
    try:
        names = as_it_was(os.listdir)(_DESCRIPTORS) if identity is not None else []
    except OSError:
        return None
    return next((int(name) for name in names if _identity(int(name)) == identity), None)
