"""What may be read of files that strangers left: sizes, numbers, depths, and streams that obey."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from distdiag.errors import DamagedFileError

_ALWAYS_PLAUSIBLE: Final = 32 << 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one walk.

    `most_bytes` of one file are held in memory at a time; `most_unpacked` come out of archives in
    all; `most_ratio` is how many bytes one packed byte may become, beyond the first 32 MiB (logs
    reach 50, a bomb of zeros 1,000). Folders and archives are entered `deepest_…` deep.
    """

    most_bytes: int = 128 << 20
    most_unpacked: int = 4 << 30
    most_files: int = 200_000
    most_ratio: int = 200
    deepest_folder: int = 32
    deepest_archive: int = 3


class Budget:
    """What is left of the limits during one walk. `reason` says which was reached first."""

    def __init__(self, limits: Limits) -> None:
        """Start with nothing used."""
        self.limits = limits
        self.reason = ""
        self._num_files = 0
        self._num_unpacked = 0

    @property
    def is_spent(self) -> bool:
        """Nothing more may be read."""
        return bool(self.reason)

    def count_file(self) -> None:
        """Count one file or member."""
        self._num_files += 1
        if self._num_files >= self.limits.most_files:
            self.reason = self.reason or f"holds more than {self.limits.most_files:,} files"

    def count_unpacked(self, num_bytes: int) -> None:
        """Count bytes that came out of an archive.

        Raises:
            DamagedFileError: they are more than may come out of all archives together.

        """
        self._num_unpacked += num_bytes
        if self._num_unpacked > self.limits.most_unpacked:
            self.reason = f"unpacks to more than {self.limits.most_unpacked >> 20} MiB"
            raise DamagedFileError(self.reason)


class MeteredStream:
    """A stream of unpacked bytes that refuses to become implausibly long.

    While `allowance` is a number, so many bytes may be read and no more.
    """

    def __init__(self, read: Callable[[int], bytes], packed_bytes: int, budget: Budget) -> None:
        """Take bytes from `read`; they all come from `packed_bytes` packed ones."""
        self._take = read
        self._plausible = max(_ALWAYS_PLAUSIBLE, packed_bytes * budget.limits.most_ratio)
        self._budget = budget
        self._num_read = 0
        self._head = b""
        self.allowance: int | None = None

    def peek(self, size: int) -> bytes:
        """Return the next bytes and leave them in the stream."""
        while len(self._head) < size and (more := self._next(size - len(self._head))):
            self._head += more
        return self._head

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes.

        Raises:
            DamagedFileError: a limit is reached.

        """
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._next(size)

    def _next(self, size: int) -> bytes:
        data = self._take(size)
        self._budget.count_unpacked(len(data))
        self._num_read += len(data)
        if self._num_read > self._plausible:
            raise DamagedFileError(
                f"looks like an archive bomb: more than {self._plausible >> 20} MiB come out of it"
            )
        if self.allowance is not None:
            self.allowance -= len(data)
            if self.allowance < 0:
                raise DamagedFileError("is damaged: the header of a member is too long")
        return data
