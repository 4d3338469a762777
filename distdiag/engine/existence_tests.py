"""Put side by side what ranks found when they tested at one place whether a file exists."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from distdiag.alignment import Alignment
from distdiag.engine.race_group import Place, place_of
from distdiag.event import (
    Collective,
    Event,
    Exited,
    FileAccess,
    FileAction,
    Finished,
    GroupCreated,
    StoreCall,
)
from distdiag.ranks import RankSet

ExistenceAlignment = Alignment[FileAccess]

_MOST_OPEN: Final = 10_000
_ENDING: Final = (Collective, GroupCreated, StoreCall, Finished, Exited)

_Test = tuple[str, Place]


class ExistenceTests:
    """The tests that not all ranks have made yet.

    A rank may test again and again until the file is there: its last answer before it goes on to
    other ranks counts.
    """

    def __init__(self, world: RankSet) -> None:
        """Expect these ranks."""
        self._world = world
        self._current: dict[int, dict[_Test, FileAccess]] = {rank: {} for rank in world}
        self._counts: Counter[tuple[int, _Test]] = Counter()
        self._open: OrderedDict[tuple[_Test, int], dict[int, FileAccess]] = OrderedDict()
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
            index = self._counts[rank, test]
            self._counts[rank, test] += 1
            by_rank = self._open.setdefault((test, index), {})
            by_rank[rank] = event
            if len(by_rank) == len(self._world):
                del self._open[test, index]
                self._compare(test, index, by_rank)
            elif len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)

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
