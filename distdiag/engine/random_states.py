"""Puts the states of random number generators side by side where they should be equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.alignment import Alignment
from distdiag.random_event import RandomDraw, RandomState
from distdiag.ranks import RankSet

MOST_OPEN: Final = 256

_Event = RandomDraw | RandomState


class RandomStreams:
    """Collect events until all ranks that should agree have told theirs."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._open: dict[tuple[str | int, ...], dict[int, _Event]] = {}
        self._counts: dict[tuple[str | int, ...], int] = {}

    def add(self, event: _Event) -> Iterator[Alignment[_Event]]:
        """Take in one event; yield the alignment that it completes."""
        if len(event.members) < 2:
            return
        key = self._key(event)
        told = self._open.setdefault(key, {})
        told[event.rank] = event
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        if told.keys() >= set(event.members):
            self._open.pop(key, None)
            by_rank = {rank: told[rank] for rank in sorted(event.members)}
            yield Alignment("random", key, by_rank, RankSet(by_rank))

    def _key(self, event: _Event) -> tuple[str | int, ...]:
        if isinstance(event, RandomDraw):
            return "draw", event.number, *event.members
        place: tuple[str | int, ...] = (event.rank, event.moment, event.step, *event.members)
        count = self._counts[place] = self._counts.get(place, -1) + 1
        return "state", count, event.moment, event.step, *event.members
