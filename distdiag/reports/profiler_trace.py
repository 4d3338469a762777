"""Traces of torch's profiler, laid on the same time as what distdiag recorded."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard

import msgspec

from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.record.regular_file import open_regular, read_all

LARGEST: Final = 1 << 30
"""A trace that is longer when it is unpacked, in bytes, is not read."""
_RANK_IN_NAME: Final = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)


class ProfilerTrace:
    """A trace as ``torch.profiler`` exports it: Chrome's JSON, plain or in gzip.

    `rank` is the rank that the trace, its processes or the name of the file tells.
    """

    def __init__(self, path: Path, pids: Mapping[int, int]) -> None:
        """Read a trace; `pids` are the ranks by their pids.

        Raises:
            UsageError: the file cannot be read, or nothing tells its rank.
            DamagedFileError: it is no trace of torch's profiler.

        """
        document = _read(path)
        events = document.get("traceEvents")
        base_ns = document.get("baseTimeNanoseconds", 0)
        if not isinstance(events, list) or not _is_time(base_ns):
            raise DamagedFileError(f"{path}: not a trace of torch's profiler")
        self._events: Sequence[object] = events
        self._base_ns = base_ns
        rank = _rank_of(path, document, pids)
        if rank is None:
            raise UsageError(f"{path}: nothing tells which rank this trace is of: name it rank-N")
        self.rank = rank
        # No set: a trace may have anything in the place of a pid.
        self._own_pids = tuple(pid for pid, of in pids.items() if of == rank)

    def events(self, base_ns: int) -> Iterator[dict[str, Any]]:
        """Yield its events; `base_ns` is the unix time of microsecond 0.

        Tracks of the rank's process stand below the rank; others, such as those of a GPU, are
        named after it.
        """
        shift_us = (self._base_ns - base_ns) / 1000
        for event in self._events:
            if not isinstance(event, dict):
                continue
            moved = dict(event)
            if isinstance(moved.get("ts"), float) or _is_time(moved.get("ts")):
                moved["ts"] += shift_us
            if moved.get("pid") in self._own_pids:
                if moved.get("name") in ("process_name", "process_sort_index", "process_labels"):
                    continue  # it has the rank's
                moved["pid"] = self.rank
            else:
                moved["pid"] = f"rank {self.rank}: {moved.get('pid')}"
            if "id" in moved:  # flows of two traces must not meet
                moved["id"] = f"{self.rank}.{moved['id']}"
            yield moved


def _is_time(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and abs(value) < 1 << 63


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            with gzip.open(file) if is_packed else file as stream:
                data = read_all(stream, path, LARGEST)
        return msgspec.json.decode(data, type=dict[str, Any])
    except (gzip.BadGzipFile, zlib.error, EOFError, *UNDECODABLE):
        raise DamagedFileError(f"{path}: not a trace of torch's profiler") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _rank_of(path: Path, document: Mapping[str, Any], pids: Mapping[int, int]) -> int | None:
    told = document.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    if isinstance(rank, int):
        return rank
    seen = (event.get("pid") for event in document["traceEvents"] if isinstance(event, dict))
    ranks = {pids[pid] for pid in seen if isinstance(pid, int) and pid in pids}
    if len(ranks) == 1:
        return ranks.pop()
    named = _RANK_IN_NAME.search(path.name)
    return int(named[1]) if named else None
