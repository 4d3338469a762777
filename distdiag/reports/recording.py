"""What the files of a run tell beside its report: the events of its ranks, within a bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import RankStarted
from distdiag.record.recent_events import RecentEvents, read_recent, recorded_ranks
from distdiag.record.run_dir import RunDir, attempts_of
from distdiag.record.wire import Interner
from distdiag.transports.journal import read_journal

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Recording:
    """The newest events of each rank, and what the monitor noted of it from outside."""

    by_rank: Mapping[int, RecentEvents] = field(default_factory=dict)
    noted: tuple[Event, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, kind: type[E]) -> Iterator[E]:
        """Yield the events of a kind, rank by rank, then those that the monitor noted."""
        for recent in self.by_rank.values():
            yield from (event for event in recent.events if isinstance(event, kind))
        yield from (event for event in self.noted if isinstance(event, kind))

    def last_of(self, kind: type[E]) -> dict[int, E]:
        """Return the last event of a kind by its rank."""
        return {event.rank: event for event in self.of(kind)}

    def offsets_ns(self) -> dict[int, int]:
        """Return how far the wall clock is ahead of the clock of each rank.

        Ranks of one host share a clock, so they share the offset that the first of them read.
        """
        by_host: dict[str, int] = {}
        offsets: dict[int, int] = {}
        for rank, recent in self.by_rank.items():
            started: RankStarted | None = recent.started
            if started is None:
                continue
            offset = started.unix_ns - started.time_ns
            offsets[rank] = by_host.setdefault(started.hostname, offset)
        known = next(iter(by_host.values()), 0)
        return {rank: offsets.get(rank, known) for rank in self.by_rank}


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many events are read: of all ranks together, and of each, the newest."""

    most_events: int
    most_of_a_rank: int
    fewest_of_a_rank: int = 1

    def share(self, num_ranks: int) -> int:
        """Return how many events of each of so many ranks are read."""
        share = self.most_events // max(1, num_ranks)
        return min(self.most_of_a_rank, max(self.fewest_of_a_rank, share))


def read_recording(run_dir: Path | None, bounds: Bounds) -> Recording:
    """Read the last attempt of a run; a folder that holds none is an empty recording."""
    folder = _last_attempt(run_dir) if run_dir is not None else None
    if folder is None:
        return Recording()
    interner = Interner()
    ranks = recorded_ranks(folder.folder)
    most = bounds.share(len(ranks))
    by_rank = {rank: read_recent(folder.folder, rank, interner, most) for rank in ranks}
    noted, problem = _noted(folder, interner, bounds.most_events)
    problems = [recent.problem for recent in by_rank.values()]
    return Recording(by_rank, noted, tuple(filter(None, [*problems, problem])))


def _noted(run_dir: RunDir, interner: Interner, most: int) -> tuple[tuple[Event, ...], str]:
    """Return what the monitor noted, up to the record that cannot be read."""
    noted: list[Event] = []
    try:
        noted.extend(islice(read_journal(run_dir.journal, interner), most))
    except FileNotFoundError:
        return (), ""
    except (OSError, DamagedFileError) as error:
        return tuple(noted), str(error)
    return tuple(noted), ""


def _last_attempt(root: Path) -> RunDir | None:
    attempts = sorted(attempts_of(root), reverse=True)
    run_dirs = (RunDir(root, attempt) for attempt in attempts)
    return next((run_dir for run_dir in run_dirs if recorded_ranks(run_dir.folder)), None)
