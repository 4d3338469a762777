"""What ranks loaded and saved of a training's state, the same moment of all ranks side by side."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import Recent, Turns
from distdiag.events.base import Event
from distdiag.events.checkpoints import (
    KINDS,
    LoadWasted,
    ScheduleRestarted,
    StateRestored,
    StateSaved,
    TrainingResumed,
    WeightsLoaded,
)
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import (
    Alignment,
    LoadWastedView,
    RankStateView,
    RestartedScheduleView,
    ResumeView,
    WeightsLoadedView,
)
from distdiag.views.base import View

_VIEWS: Final[Mapping[type[Event], type[Alignment[Any]]]] = {
    WeightsLoaded: WeightsLoadedView,
    LoadWasted: LoadWastedView,
    TrainingResumed: ResumeView,
    ScheduleRestarted: RestartedScheduleView,
    StateSaved: RankStateView,
    StateRestored: RankStateView,
}

_OF_LOADS: Final = (WeightsLoaded, LoadWasted, TrainingResumed, ScheduleRestarted)
"""A load is known by any of them: an optimizer that steps after a load tells of it."""
_OF_LOADED: Final = (WeightsLoadedView, LoadWastedView, ResumeView, RestartedScheduleView)
_NO_LOAD: Final = NothingThere("checkpoints", "nothing was loaded into a model or an optimizer")
_NO_STATE: Final = NothingThere(
    "checkpoints", "no state of a rank was given to a distributed checkpoint"
)

_MOST_OPEN: Final = 1024
"""So many loads and saves are followed that not all ranks have come to."""

_Key = tuple[str | int, ...]


class LoadAligner(Aligner):
    """What was loaded and saved: shown when all ranks are there, the rest at the end."""

    needs = (*KINDS, ProbeDisabled)

    builds = (WeightsLoadedView, LoadWastedView, ResumeView, RestartedScheduleView, RankStateView)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._open: Recent[_Key, dict[int, Event]]
        self._open = Recent(_MOST_OPEN, "loads and saves of states", job.forgotten)
        self._turns: Turns[_Key] = Turns(len(job.world), _MOST_OPEN, forgotten=job.forgotten)
        self._blind: set[int] = set()
        self._seen: set[type[Event]] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there were no loads and saves, or not all were seen."""
        if self._blind:
            why = f"what {RankSet(self._blind).phrase()} loaded and saved is not observed wholly"
            return dict.fromkeys(self.builds, NotObserved(why))
        gaps: dict[type[View | Event], Gap] = {}
        if self._seen.isdisjoint(_OF_LOADS):
            gaps |= dict.fromkeys(_OF_LOADED, _NO_LOAD)
        if self._seen.isdisjoint((StateSaved, StateRestored)):
            gaps[RankStateView] = _NO_STATE
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        if isinstance(event, ProbeDisabled):
            if event.probe in ("loads", "rank-states"):
                self._blind.add(event.rank)
            return
        self._seen.add(type(event))
        key = _key_of(event)
        number = self._turns.next(key, event.rank)
        if number is None:
            return
        key = (*key, number + 1)
        by_rank = self._open.of(key, dict)
        by_rank[event.rank] = event
        if by_rank.keys() >= self._expected(by_rank):
            yield self._view(key, self._open.pop(key))

    def end(self) -> Iterator[View]:
        """Show what not all ranks have reached."""
        for key in list(self._open):
            yield self._view(key, self._open.pop(key))

    def _view(self, key: _Key, by_rank: dict[int, Any]) -> View:
        kind = _VIEWS[type(next(iter(by_rank.values())))]
        return kind("load", key, by_rank, self._expected(by_rank))

    def _expected(self, by_rank: Mapping[int, Event]) -> RankSet:
        first = next(iter(by_rank.values()))
        return RankSet(first.members) if isinstance(first, StateSaved) else self.job.world


def _key_of(event: Event) -> _Key:
    kind = type(event).__name__
    match event:
        case WeightsLoaded():
            return (kind, event.target)
        case LoadWasted():
            return (kind, event.waste, event.target)
        case TrainingResumed() | ScheduleRestarted():
            return (kind, event.optimizer)
        case StateSaved():
            return (kind, *event.members)
    return (kind,)
