"""Read dumps of torch's flight recorder: pickle and JSON, of every backend, format versions 2.x.

A dump is ``{"version": "2.10", "pg_config": {name: {"name", "desc", "ranks": "[0, 1]"}},
"entries": [{"record_id", "process_group": (name, desc), "collective_seq_id", "profiling_name":
"nccl:all_reduce", "input_sizes": [[4]], "state", "frames": [{"name", "filename", "line"}], …}]}``,
oldest entry first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from distdiag.dumps.reading import Dump, DumpReader, RankDump
from distdiag.dumps.recordings import RecordingBuilder, RecordingDump
from distdiag.dumps.safe_pickle import UnsafePickleError, load_plain
from distdiag.errors import UNDECODABLE, DamagedFileError

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


def _group_ranks(config: Any) -> Mapping[str, str]:  # noqa: ANN401
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
