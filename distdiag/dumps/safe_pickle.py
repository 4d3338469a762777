"""Read pickles of strangers: containers, strings and numbers are built, and nothing is called."""

from __future__ import annotations

import gc
import io
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

LEAST_ROOM: Final = 512 << 20
MOST_ROOM: Final = 6 << 30
BYTES_FOR_BYTE: Final = 100
"""An empty dict is one byte in a pickle, and takes 64 in memory and 8 in the list that holds it."""

_FAILURES: Final = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What the unpickler of the standard library raises when the bytes make no sense."""


class UnsafePickleError(ValueError):
    """The bytes are no pickle, ask for more than plain values, or for too much memory."""


class _PlainUnpickler(pickle.Unpickler):
    """The C unpickler, which asks these two methods for everything that is not a plain value."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafePickleError(f"it asks for {module}.{name}, and nothing is ever imported")

    def persistent_load(self, identifier: object) -> NoReturn:
        raise UnsafePickleError("it refers to an object outside of itself")


def load_plain(data: bytes) -> object:
    """Return the value of a pickle that holds containers, strings, bytes and numbers only.

    The result may share parts and may contain itself, so it must not be walked without a limit.

    Raises:
        UnsafePickleError: it holds anything else, is damaged, or wants too much memory.

    """
    room = min(MOST_ROOM, LEAST_ROOM + BYTES_FOR_BYTE * len(data))
    try:
        with _at_most(room), _without_gc():
            # Without peek() the unpickler would fetch each opcode by a call of read().
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(data), 1 << 20)).load()
    except UnsafePickleError:
        raise
    except MemoryError:
        raise UnsafePickleError(f"it wants more than {room >> 20} MiB of memory") from None
    except _FAILURES as error:
        raise UnsafePickleError(f"it is no whole pickle: {str(error) or 'it is cut'}") from None


@contextmanager
def _at_most(room: int) -> Iterator[None]:
    """Let this process grow by so many bytes only.

    A single opcode may name place 4294967295 of the memo, and the unpickler then makes a memo of
    twice that many places.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    ceiling = pages * resource.getpagesize() + room
    limits = [limit for limit in (soft, hard, ceiling) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _without_gc() -> Iterator[None]:
    """Leave the garbage collector out: it would look at all values again while they are built."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
