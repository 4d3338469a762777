"""What the engine knows of files: races, tests whether they exist, and files that are missing."""

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import Forgotten, Recent, SinceFirst, Turns
from distdiag.engine.files.conflicts import Place, place_of
from distdiag.engine.files.races import FileRaces
from distdiag.events.base import Event
from distdiag.events.collectives import Collective, CollectiveState, GroupCreated
from distdiag.events.files import MAKING, FileAccess, FileAction, StoreCall
from distdiag.events.lifecycle import Exited, Finished, ProbeDisabled, Raised
from distdiag.events.losses import LossWeights
from distdiag.events.models import (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    PlanPatterns,
    SliceSaved,
)
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment, FileTestView
from distdiag.views.base import View
from distdiag.views.files import MissingFile, Race

# Put side by side what ranks found when they tested at one place whether a file exists.

ExistenceAlignment = Alignment[FileAccess]

_NO_FILE: Final = NothingThere("file accesses", "no access to a file was observed")
_OTHERS: Final = frozenset(
    {LossWeights, ModelPlan, ModelState, OptimizerState, PartialRead, PlanPatterns}
    | {RandomDraw, RandomState, SliceSaved}
)
"""Of models: nothing for the order of accesses."""
_MOST_OPEN: Final = 4096
_MOST_TESTS: Final = 20_000
_ENDING: Final = (Collective, GroupCreated, StoreCall, Finished, Exited)

_Test = tuple[str, Place]


class ExistenceTests:
    """The tests that not all ranks have made yet.

    A rank may test again and again until the file is there: its last answer before it goes on to
    other ranks counts.
    """

    def __init__(self, world: RankSet, forgotten: Forgotten | None = None) -> None:
        self._world = world
        self._current: dict[int, dict[_Test, FileAccess]] = {rank: {} for rank in world}
        self._turns: Turns[_Test] = Turns(len(world), _MOST_TESTS, forgotten=forgotten)
        self._open: Recent[tuple[_Test, int], dict[int, FileAccess]] = Recent(_MOST_OPEN)
        self._complete: list[ExistenceAlignment] = []

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        current = self._current[event.rank]
        if isinstance(event, FileAccess):
            if event.action is FileAction.TEST and event.found is not None:
                current[event.path, place_of(event.site)] = event
        elif current and isinstance(event, _ENDING):
            self._go_on(event.rank)

    def _go_on(self, rank: int) -> None:
        current, self._current[rank] = self._current[rank], {}
        for test, event in current.items():
            index = self._turns.next(test, rank)
            if index is None:
                continue
            by_rank = self._open.of((test, index), dict)
            by_rank[rank] = event
            if len(by_rank) == len(self._world):
                del self._open[test, index]
                self._compare(test, index, by_rank)

    def _compare(self, test: _Test, index: int, by_rank: dict[int, FileAccess]) -> None:
        if len({event.found for event in by_rank.values()}) == 1:
            return
        self._complete.append(
            Alignment(
                kind="test",
                key=(test[0], index),
                by_rank=dict(sorted(by_rank.items())),
                expected_ranks=self._world,
            )
        )

    def finish(self) -> None:
        """No rank goes on any more."""
        for rank in self._world:
            self._go_on(rank)

    def take(self) -> list[ExistenceAlignment]:
        """Return those that all ranks have made and that found different things, once."""
        complete, self._complete = self._complete, []
        return complete


# Files that a rank needed and that were never there: who wrote one of that name elsewhere.

RECENT: Final = 64
MOST_NAMES: Final = 4096

_ABSENT: Final = ("FileNotFoundError", "No such file", "does not exist", "not found")
_NUMBER: Final = re.compile(r"\d+")
_QUOTED: Final = re.compile(r"""['"](/[^'"]+)['"]""")


class MissingFiles:
    """Remembers who wrote which file, and what each rank accessed last."""

    def __init__(self, forgotten: Forgotten | None = None) -> None:
        self._made: SinceFirst[str, dict[int, FileAccess]]
        self._made = SinceFirst(MOST_NAMES, forgotten=forgotten)
        self._parts: Recent[str, dict[int, FileAccess]] = Recent(MOST_NAMES)
        self._recent: dict[int, deque[FileAccess]] = defaultdict(lambda: deque(maxlen=RECENT))

    def add(self, access: FileAccess) -> None:
        """Take in an access of a rank."""
        if access.action in MAKING:
            name = PurePosixPath(access.path).name
            self._made.of(name, dict)[access.rank] = access
            self._parts.of(_without_numbers(access.path), dict)[access.rank] = access
        else:
            self._recent[access.rank].append(access)

    def explain(self, raised: Raised) -> MissingFile | None:
        """Return the file for lack of which a rank ended, if others wrote one of such a name."""
        if not any(sign in f"{raised.type}: {raised.message}" for sign in _ABSENT):
            return None
        found = self._path_of(raised)
        if found is None:
            return None
        path, written = found
        name = PurePosixPath(path).name
        made = self._made.get(name, {})
        if self._made.has_lost(name):
            return None  # it may have been written
        if any(access.path == path for access in made.values()):
            return None  # it was written, sooner or later: a matter of order
        others = {rank: access for rank, access in made.items() if rank != raised.rank}
        parts = self._parts.get(_without_numbers(path), {})
        siblings = {rank: access for rank, access in parts.items() if rank != raised.rank}
        if not (others or siblings):
            return None
        paths = {raised.rank: path} | {rank: access.path for rank, access in others.items()}
        above = {rank: self._folder_of(rank, each) for rank, each in paths.items()}
        folders = {rank: folder for rank, folder in above.items() if folder is not None}
        return MissingFile(raised.rank, path, raised, others, siblings, written, folders)

    def _folder_of(self, rank: int, path: str) -> FileAccess | None:
        """Return how a rank last made a folder above this path."""
        for access in reversed(self._recent[rank]):
            if access.action is FileAction.MAKE_DIR and path.startswith(f"{access.path}/"):
                return access
        return None

    def _path_of(self, raised: Raised) -> tuple[str, str] | None:
        """Return the path that was not there, and as the program gave it (empty: unknown)."""
        recent = self._recent[raised.rank]
        for access in reversed(recent):
            if access.action is FileAction.MAKE_DIR:
                continue  # a folder above it is named in its path
            if access.path in raised.message or access.written in raised.message:
                return access.path, access.written
        quoted = _QUOTED.search(raised.message)
        return (quoted[1], "") if quoted is not None else None


def _without_numbers(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/{_NUMBER.sub('#', name)}"


# The aligner.


class FileAligner(Aligner):
    """Accesses to files that nothing orders, tests of existence, and files that were missing."""

    needs = (Event,)
    builds = (Race, FileTestView, MissingFile)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._is_alone = len(job.world) < 2
        self._races = FileRaces(job.world)
        self._tests = ExistenceTests(job.world, job.forgotten)
        self._missing = MissingFiles(job.forgotten)
        self._raised: list[Raised] = []
        self._blind: set[int] = set()
        self._has_accesses = False

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say why not all accesses were compared."""
        if self._blind:
            why = f"the files of {RankSet(self._blind).phrase()} are not observed wholly"
            return dict.fromkeys(self.builds, NotObserved(why))
        problem = self._races.problem
        if problem:
            return dict.fromkeys(self.builds, NotObserved(problem))
        return {} if self._has_accesses else dict.fromkeys(self.builds, _NO_FILE)

    def feed(self, event: Event) -> tuple[()]:
        """Take in one event of one rank; what there is to show is asked for from time to time."""
        kind = type(event)
        if kind is ProbeDisabled and event.probe == "files":  # type: ignore[attr-defined]
            self._blind.add(event.rank)
        if self._is_alone or kind in _OTHERS:
            return ()
        if kind is CollectiveState and event.state == "issued":  # type: ignore[attr-defined]
            return ()  # the most frequent of all events, and nothing for anybody here
        if kind is FileAccess or kind is Raised:
            self._feed_rare(event)
        if self._has_accesses:
            self._tests.feed(event)
        self._races.order.feed(event)
        return ()

    def _feed_rare(self, event: Event) -> None:
        if isinstance(event, FileAccess):
            self._has_accesses = True
            self._missing.add(event)
        elif isinstance(event, Raised):
            self._raised.append(event)
            self._races.note_end(event)

    def tick(self, now_ns: int, unseen: Collection[int]) -> Iterator[View]:
        """Let time pass, and show the races that are new or have grown."""
        if self._is_alone:
            return
        self._take_doubt()
        self._races.order.advance(now_ns, unseen)
        yield from self._views()

    def end(self) -> Iterator[View]:
        """Show the rest, and the files for lack of which ranks ended."""
        if self._is_alone:
            return
        self._take_doubt()
        self._races.finish()
        self._tests.finish()
        yield from self._views()
        for raised in self._raised:
            missing = self._missing.explain(raised)
            if missing is not None:
                yield missing

    def _take_doubt(self) -> None:
        doubted_since_ns = self.job.order.doubted_since_ns
        if doubted_since_ns is not None:
            self._races.order.doubt(doubted_since_ns)

    def _views(self) -> Iterator[View]:
        for test in self._tests.take():
            yield test.show_as(FileTestView, self.job.states())
        for key, race in self._races.changed():
            yield replace(race, states=self.job.states(), key=key)
