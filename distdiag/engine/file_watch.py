"""What the engine knows of files: races, tests whether they exist, and files that are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from distdiag.alignment import MissingFile, Race
from distdiag.engine.existence_tests import ExistenceAlignment, ExistenceTests
from distdiag.engine.file_races import FileRaces
from distdiag.engine.missing_files import MissingFiles
from distdiag.engine.race_group import RaceKey
from distdiag.event import CollectiveState, Event, FileAccess, Raised
from distdiag.ranks import RankSet


class FileWatch:
    """Feed events as they come, and ask for what there is to judge from time to time."""

    def __init__(self, world: RankSet) -> None:
        """Watch these ranks."""
        self._races = FileRaces(world)
        self._tests = ExistenceTests(world)
        self._missing = MissingFiles()
        self._raised: list[Raised] = []
        self._has_accesses = False
        self._is_over = False

    @property
    def problem(self) -> str:
        """Why not all accesses were compared, or an empty string."""
        return self._races.problem

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        kind = type(event)
        if kind is CollectiveState and event.state == "issued":  # type: ignore[attr-defined]
            return  # the most frequent of all events, and nothing for anybody here
        if kind is FileAccess or kind is Raised:
            self._feed_rare(event)
        if self._has_accesses:
            self._tests.feed(event)
        self._races.order.feed(event)

    def _feed_rare(self, event: Event) -> None:
        if isinstance(event, FileAccess):
            self._has_accesses = True
            self._missing.add(event)
        elif isinstance(event, Raised):
            self._raised.append(event)
            self._races.note_end(event)

    def doubt(self, since_ns: int) -> None:
        """From this time on calls are paired wrongly: the order that they make is not known."""
        self._races.order.doubt(since_ns)

    def advance(self, now_ns: int, unseen: Collection[int]) -> None:
        """Let time pass; nothing can be heard now of the ranks in `unseen`."""
        self._races.order.advance(now_ns, unseen)

    def finish(self) -> None:
        """Nothing more comes."""
        self._races.finish()
        self._tests.finish()
        self._is_over = True

    def races(self) -> Iterator[tuple[RaceKey, Race]]:
        """Yield the races that are new or have grown."""
        return self._races.changed()

    def tests(self) -> list[ExistenceAlignment]:
        """Return the tests that found different things, once."""
        return self._tests.take()

    def missing(self) -> Iterator[MissingFile]:
        """Yield, at the end, the files for lack of which ranks ended."""
        for raised in self._raised if self._is_over else ():
            missing = self._missing.explain(raised)
            if missing is not None:
                yield missing
