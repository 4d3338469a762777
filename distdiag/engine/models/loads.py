"""What ranks loaded and saved of a training's state, the same moment of all ranks side by side."""

from __future__ import annotations

from distdiag.engine.aligner import Watch
from distdiag.engine.runner import Judges
from distdiag.events.base import Event
from distdiag.events.checkpoints import (
    KINDS,
    LoadWasted,
    StateSaved,
    TrainingResumed,
    WeightsLoaded,
)
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment

_Key = tuple[str | int, ...]


class StateLoads(Watch):
    """Feed events as they come; what all ranks have told is judged at once, the rest at the end."""

    kinds = (*KINDS, ProbeDisabled)

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Nothing was loaded or saved yet."""
        self._world = world
        self._judges = judges
        self._open: dict[_Key, dict[int, Event]] = {}
        self._expected: dict[_Key, RankSet] = {}
        self._counts: dict[tuple[int, _Key], int] = {}
        self._blind: set[int] = set()

    @property
    def not_checked(self) -> dict[str, str]:
        """The codes of the checks of loads and saves, if not all were seen, and why."""
        if not self._blind:
            return {}
        why = f"what {RankSet(self._blind).phrase()} loaded and saved is not observed wholly"
        return {check.code: why for kind in KINDS for check in self._judges.needing(kind)}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        if isinstance(event, ProbeDisabled):
            if event.probe in ("loads", "rank-states"):
                self._blind.add(event.rank)
            return
        key = _key_of(event)
        number = self._counts[event.rank, key] = self._counts.get((event.rank, key), 0) + 1
        key = (*key, number)
        self._expected.setdefault(key, _expected(event) or self._world)
        by_rank = self._open.setdefault(key, {})
        by_rank[event.rank] = event
        if by_rank.keys() >= self._expected[key]:
            self._judges.judge(self._alignment(key, self._open.pop(key)))

    def finish(self) -> None:
        """Judge what not all ranks have told."""
        for key in list(self._open):
            self._judges.judge(self._alignment(key, self._open.pop(key)))

    def _alignment(self, key: _Key, by_rank: dict[int, Event]) -> Alignment[Event]:
        return Alignment("load", key, by_rank, self._expected[key])


def _key_of(event: Event) -> _Key:
    kind = type(event).__name__
    match event:
        case WeightsLoaded():
            return (kind, event.target)
        case LoadWasted():
            return (kind, event.waste, event.target)
        case TrainingResumed():
            return (kind, event.optimizer)
        case StateSaved():
            return (kind, *event.members)
    return (kind,)


def _expected(event: Event) -> RankSet | None:
    return RankSet(event.members) if isinstance(event, StateSaved) else None
