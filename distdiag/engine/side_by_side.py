"""Puts events that ranks write about the same thing side by side."""

from collections.abc import Iterator
from typing import Any, Final, Protocol

from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment

MOST_OPEN: Final = 512

Place = tuple[type, str, int, int]


class Placed(Protocol):
    """An event of which several ranks write one."""

    @property
    def rank(self) -> int:
        """Whose it is."""

    @property
    def place(self) -> tuple[str, int]:
        """What the events have in common that belong together."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that write one; empty if that is not known."""


class SideBySide:
    """Collect events until all ranks have reported the same `place`.

    Ranks that train together are compared with one another as soon as all of them have reported.
    """

    def __init__(self, world: RankSet) -> None:
        self._world = world
        self._open: dict[Place, dict[int, Any]] = {}
        self._judged: dict[Place, set[int]] = {}

    def add(self, event: Placed, generation: int = 0) -> Alignment[Any] | None:
        """Take in one event; return the alignment that it completes.

        `generation` tells things of one name from one another that follow each other.
        """
        place = (type(event), *event.place, generation)
        events = self._open.setdefault(place, {})
        events.setdefault(event.rank, event)
        if len(self._open) > MOST_OPEN:
            oldest = next(iter(self._open))
            del self._open[oldest]
            self._judged.pop(oldest, None)
        group = set(event.members or self._world)
        if not group <= events.keys():
            return None
        self._judged.setdefault(place, set()).update(group)
        if self._judged[place] >= set(self._world):
            self._open.pop(place, None)
            self._judged.pop(place, None)
        return self._alignment(place, {rank: events[rank] for rank in sorted(group)})

    def rest(self) -> Iterator[Alignment[Any]]:
        """Yield, at the end, what not all ranks have reported."""
        for place, events in self._open.items():
            judged = self._judged.get(place, set())
            groups: dict[tuple[int, ...], dict[int, Any]] = {}
            for rank, event in sorted(events.items()):
                if rank not in judged:
                    groups.setdefault(event.members, {})[rank] = event
            for group in groups.values():
                yield self._alignment(place, group)
        self._open.clear()

    def _alignment(self, place: Place, by_rank: dict[int, Any]) -> Alignment[Any]:
        return Alignment("data", place[1:3], by_rank, RankSet(by_rank))
