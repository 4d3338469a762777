"""Read dumps of torch's flight recorder: pickle and JSON, of every backend, format versions 2.x.

A dump is ``{"version": "2.10", "pg_config": {name: {"name", "desc", "ranks": "[0, 1]"}},
"entries": [{"record_id", "process_group": (name, desc), "collective_seq_id", "profiling_name":
"nccl:all_reduce", "input_sizes": [[4]], "state", "frames": [{"name", "filename", "line"}], …}]}``,
oldest entry first.
"""

import gc
import io
import pickle
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from distdiag.dumps.flight_recorder.builder import RecordingBuilder
from distdiag.dumps.flight_recorder.recording import RecordingDump
from distdiag.dumps.reading import Dump, DumpReader, RankDump
from distdiag.events.errors import UNDECODABLE, DamagedFileError

# Read pickles of strangers: containers, strings and numbers are built, and nothing is called.

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


# Reads a whole dump, whichever form it has.

MOST_ENTRIES: Final = 500_000

_SIGNS: Final = (b"profiling_name", b"pg_config")
_PICKLE: Final = b"\x80"
_SENSELESS: Final = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
"""What an entry raises that is not one; msgspec.ValidationError is a ValueError."""


class FlightRecorder(DumpReader):
    """Dumps that ``TORCH_FR_DUMP_TEMP_FILE`` names, or that ``_dump_fr_trace`` returned."""

    name = "flight-recorder"

    def recognises(self, dump: Dump) -> bool:
        """Look for the names of fields in a pickle or a JSON object."""
        head = dump.data[:64].lstrip()[:1]
        return head in (_PICKLE, b"{") and any(sign in dump.data for sign in _SIGNS)

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield one recording.

        Raises:
            DamagedFileError: the file is cut, damaged, hostile or of another version.

        """
        try:
            yield _recording(dump)
        except _UNREADABLE as error:
            reason = " ".join(str(error).split())[:300]
            raise DamagedFileError(
                f"{dump.path}: the flight-recorder dump cannot be read: {reason}"
            ) from None


class _ForeignError(Exception):
    """The content is not what the flight recorder writes."""


_UNREADABLE: Final = (_ForeignError, UnsafePickleError, *UNDECODABLE)


def _recording(dump: Dump) -> RecordingDump:
    is_pickle = dump.data[:1] == _PICKLE
    top = load_plain(dump.data) if is_pickle else msgspec.json.decode(dump.data)
    if not isinstance(top, dict):
        raise _ForeignError(f"it holds a {type(top).__name__} instead of fields")
    version = top.get("version")
    if not isinstance(version, str) or not version.startswith("2."):
        raise _ForeignError(f"its format version is {str(version)[:20]!r}, and 2.x is known")
    # A recorder without entries leaves the field out of its JSON.
    entries = top.get("entries", [])
    if not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
        raise _ForeignError(f"its entries are no list of at most {MOST_ENTRIES:,}")
    builder = RecordingBuilder(_group_ranks(top.get("pg_config")))
    for place, entry in enumerate(entries):
        try:
            builder.add(entry)
        except _SENSELESS as error:
            raise _ForeignError(f"entry {place} makes no sense: {_reason(error)}") from None
    try:
        recording = builder.build(version)
    except (OverflowError, TypeError, ValueError) as error:
        raise _ForeignError(f"its numbers make no sense: {error}") from None
    return RecordingDump(
        rank=None, events=(), path=dump.path, source=FlightRecorder.name, recording=recording
    )


def _group_ranks(config: object) -> Mapping[str, str]:
    """Return the text of the ranks of each group that the dump describes."""
    if not isinstance(config, dict):
        return {}
    ranks = {name: item.get("ranks") for name, item in config.items() if isinstance(item, dict)}
    return {
        name: text
        for name, text in ranks.items()
        if isinstance(name, str) and isinstance(text, str)
    }


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
