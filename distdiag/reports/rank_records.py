"""What the ranks of a run have recorded last, as its run directory holds it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import RankStarted
from distdiag.record.event_reader import EventReader
from distdiag.record.run_dir import RunDir
from distdiag.record.wire import EventDecoder, Interner
from distdiag.transports.journal import read_journal

MOST_SEGMENTS: Final = 8
"""So many segments of a rank are read, the newest: 8 MiB, some 100,000 calls."""
_FIRST_RECORDS: Final = 16
"""The start of a rank stands among so many records, the definitions before it counted."""


@dataclass(frozen=True, slots=True)
class RankRecords:
    """The newest events of one rank in their order, and its start, where that can be read.

    `num_left_out` events come before them, as far as they were read; `problem` is what ended it.
    """

    rank: int
    events: tuple[Event, ...]
    started: RankStarted | None
    num_left_out: int = 0
    problem: str = ""

    @property
    def offset_ns(self) -> int:
        """How far the wall clock is ahead of the rank's own; 0 if nobody knows."""
        return self.started.unix_ns - self.started.time_ns if self.started else 0


def last_attempt(root: Path) -> RunDir | None:
    """Return the last attempt in a run directory, None where there is none."""
    names = (path.name.removeprefix("attempt-") for path in root.glob("attempt-*"))
    attempts = [int(name) for name in names if name.isdecimal()]
    return RunDir(root, max(attempts)) if attempts else None


def read_ranks(run_dir: RunDir, most: int) -> Iterator[RankRecords]:
    """Yield the last events of each rank, at most so many of all together."""
    segments: dict[int, list[int]] = {}
    for path in run_dir.folder.glob("rank-*.*.events"):
        rank, _, rest = path.name.removeprefix("rank-").partition(".")
        segment = rest.partition(".")[0]
        if rank.isdecimal() and segment.isdecimal():
            segments.setdefault(int(rank), []).append(int(segment))
    canon = Interner()
    for number, numbers in sorted(segments.items()):
        first = sorted(numbers)[-MOST_SEGMENTS:][0]
        yield _read(run_dir.folder, number, first, most // len(segments), canon)


def _read(folder: Path, rank: int, first: int, most: int, canon: Interner) -> RankRecords:
    kept: deque[Event] = deque(maxlen=max(1, most))
    number, problem = 0, ""
    try:
        for event in _events(folder, rank, first, canon):
            kept.append(event)
            number += 1
    except (OSError, DamagedFileError) as error:
        problem = str(error)
    return RankRecords(rank, tuple(kept), _started(folder, rank), number - len(kept), problem)


def _events(folder: Path, rank: int, first: int, canon: Interner) -> Iterator[Event]:
    decoder = EventDecoder(rank, canon)
    for payload in EventReader(folder, rank, first=first).payloads():
        event = decoder.decode(payload)
        # A hostile file may speak of another rank.
        if event is not None and event.rank == rank:
            yield event


def _started(folder: Path, rank: int) -> RankStarted | None:
    decoder = EventDecoder(rank, Interner())
    try:
        for payload in EventReader(folder, rank).payloads(_FIRST_RECORDS):
            event = decoder.decode(payload)
            if isinstance(event, RankStarted):
                return event
    except (OSError, DamagedFileError):
        return None
    return None


def read_noted(run_dir: RunDir) -> tuple[Event, ...]:
    """Return what the monitor has noted of the ranks, as far as it can be read."""
    noted: list[Event] = []
    try:
        noted.extend(read_journal(run_dir.journal, Interner()))
    except (OSError, DamagedFileError):
        return tuple(noted)
    return tuple(noted)
