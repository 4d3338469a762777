"""Keeps the numbers that ranks log and that their losses hold, and shows them as they grow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from math import prod
from typing import Any, Final

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import Recent
from distdiag.events.base import CallSite, Event
from distdiag.events.data import EpochFed, ModelFed
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.logged import NOWHERE, CodesChosen, Logged, LossNumbers, MemoryUse, Warned
from distdiag.events.models import ModelPlan, Moment
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.logged import (
    CodebookView,
    LoggedSeries,
    LoggedView,
    LossView,
    MemoryView,
    ParameterView,
    WarningView,
)

MOST_VALUES: Final = 4096
"""So many values of one name, or passes of one line, are kept of each rank: the last ones."""
MOST_KEPT: Final = 128
"""So many names of each rank, and lines of the job, are kept."""
FIRST_LOOK: Final = 64
"""So many events of one rank are there when checks first look; then whenever they have doubled."""

_NOT_LOGGED: Final = NothingThere("logged numbers", "no number was logged by a known logger")
_NO_LOSS: Final = NothingThere("losses of one number", "no backward pass began at one number")


MOST_POINTS: Final = 1 << 18
MOST_PASSES: Final = 1 << 15
"""So many values of all names, and passes of all lines, are kept of all ranks together: each of
them then has fewer than `MOST_VALUES`, but at least `FEWEST_VALUES`."""
FEWEST_VALUES: Final = 64
_MOST_STREAMS: Final = 4096


def _trim(values: deque[Any], most: int) -> None:
    while len(values) > max(most, FEWEST_VALUES):
        values.popleft()


class _Pace:
    """Says when a stream has grown enough to be looked at again."""

    def __init__(self) -> None:
        self._counts: Recent[Hashable, int] = Recent(_MOST_STREAMS)

    def is_due(self, key: Hashable) -> bool:
        """Count one more; say whether they have doubled since the last look."""
        count = self._counts[key] = self._counts.of(key, int) + 1
        return count >= FIRST_LOOK and count & (count - 1) == 0


class NumbersAligner(Aligner):
    """Shows what is logged, and the passes from each line, when they have doubled."""

    needs = (Logged, LossNumbers, ModelFed, ProbeDisabled)
    builds = (LoggedView, LossView)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._pace = _Pace()
        self._points: dict[int, dict[str, deque[tuple[int, float]]]] = {}
        self._names: dict[tuple[int, str], tuple[str, CallSite]] = {}
        self._sites: dict[int, dict[tuple[str, ...], CallSite]] = {}
        self._places: dict[int, CallSite] = {}
        self._passes: dict[Hashable, dict[int, deque[LossNumbers]]] = {}
        self._site_of: dict[Hashable, CallSite] = {}
        self._inputs: Recent[tuple[int, str], tuple[str, ...]] = Recent(_MOST_STREAMS)
        self._varied: set[int] = set()
        self._blind: set[int] = set()
        self._num_series = self._num_streams = 0

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether nothing was logged, or no loss was looked at."""
        gaps: dict[type[View | Event], Gap] = {}
        if not self._points:
            gaps[LoggedView] = _NOT_LOGGED
        if self._blind:
            gaps[LossView] = NotObserved(
                f"the losses of {RankSet(self._blind).phrase()} are not observed"
            )
        elif not self._passes:
            gaps[LossView] = LIGHT if self.job.only_start else _NO_LOSS
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case Logged():
                self._feed_logged(event)
                if self._pace.is_due((event.rank, *(name for name, _ in event.values))):
                    yield self._logged_view()
            case LossNumbers():
                place = self._feed_loss(event)
                if place is not None and self._pace.is_due((event.rank, place)):
                    yield self._loss_view(place)
            case ModelFed():
                self._feed_inputs(event)
            case ProbeDisabled(probe="loss-numbers"):
                self._blind.add(event.rank)

    def end(self) -> Iterator[View]:
        """Show all that is known."""
        if self._points:
            yield self._logged_view()
        for place in self._passes:
            yield self._loss_view(place)

    def _feed_logged(self, event: Logged) -> None:
        series = self._points.setdefault(event.rank, {})
        for name, value in event.values:
            if name not in series and len(series) >= MOST_KEPT:
                continue
            if (event.rank, name) not in self._names:
                self._names[event.rank, name] = event.logger, event.site
            if name not in series:
                self._num_series += 1
            points = series.setdefault(name, deque(maxlen=MOST_VALUES))
            points.append((event.num_updates, value))
            _trim(points, MOST_POINTS // self._num_series)

    def _feed_loss(self, event: LossNumbers) -> Hashable:
        if event.site.frames:
            self._places[event.rank] = event.site
        site = self._places.get(event.rank, NOWHERE)
        place = site.location
        if place not in self._passes and len(self._passes) >= MOST_KEPT:
            return None
        self._site_of.setdefault(place, site)
        by_rank = self._passes.setdefault(place, {})
        if event.rank not in by_rank:
            self._num_streams += 1
        passes = by_rank.setdefault(event.rank, deque(maxlen=MOST_VALUES))
        passes.append(event)
        _trim(passes, MOST_PASSES // self._num_streams)
        return place

    def _feed_inputs(self, event: ModelFed) -> None:
        if event.inputs and all(event.inputs):
            first = self._inputs.of((event.rank, event.model), lambda: event.inputs)
            if first != event.inputs:
                self._varied.add(event.rank)

    def _series(self) -> dict[int, dict[str, LoggedSeries]]:
        return {
            rank: {
                name: LoggedSeries(name, *self._names[rank, name], tuple(points))
                for name, points in series.items()
            }
            for rank, series in sorted(self._points.items())
        }

    def _logged_view(self) -> LoggedView:
        return LoggedView(self._series(), self.job.numerics)

    def _loss_view(self, place: Hashable) -> LossView:
        by_rank = {r: tuple(each) for r, each in sorted(self._passes[place].items())}
        varied = frozenset(self._varied)
        return LossView(self._site_of[place], by_rank, self._series(), self.job.numerics, varied)


_NO_MODEL: Final = NothingThere("models", "no model was seen")


class ParameterAligner(Aligner):
    """Shows the sizes of the tensors of each model, once all of one rank are known."""

    needs = (ModelPlan,)
    builds = (ParameterView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._sizes: Recent[tuple[int, str], dict[str, int]] = Recent(MOST_KEPT)
        self._shown: Recent[str, bool] = Recent(_MOST_STREAMS)

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was a model."""
        return {} if self._shown else {ParameterView: _NO_MODEL}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in a part of the plan of a model."""
        assert isinstance(event, ModelPlan)
        if event.model in self._shown or event.moment is not Moment.START:
            return
        sizes = self._sizes.of((event.rank, event.model), dict)
        sizes.update({tensor.name: prod(tensor.shape) for tensor in event.tensors})
        if event.first + len(event.tensors) >= event.total:
            self._shown.of(event.model, lambda: True)
            del self._sizes[event.rank, event.model]
            yield ParameterView(event.model, event.rank, sizes, event.site, self.job.numerics)


_NO_CODES: Final = NothingThere("codebooks", "no code was chosen by its distance")


_MOST_WINDOWS: Final = 256
"""So many windows of a codebook are kept of each rank, the newest ones."""


class CodesAligner(Aligner):
    """Shows the windows of each codebook when they have doubled, and at the end."""

    needs = (CodesChosen,)
    builds = (CodebookView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._windows: dict[str, dict[int, deque[CodesChosen]]] = {}
        self._counts: Counter[tuple[str, int]] = Counter()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was a codebook."""
        return {} if self._windows else {CodebookView: _NO_CODES}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one window of one rank."""
        assert isinstance(event, CodesChosen)
        if event.codebook not in self._windows and len(self._windows) >= MOST_KEPT:
            return
        by_rank = self._windows.setdefault(event.codebook, {})
        windows = by_rank.setdefault(event.rank, deque(maxlen=_MOST_WINDOWS))
        windows.append(event)
        count = self._counts[event.codebook, event.rank] = (
            self._counts[event.codebook, event.rank] + 1
        )
        if count >= 4 and count & (count - 1) == 0:
            yield self._view(event.codebook)

    def end(self) -> Iterator[View]:
        """Show all windows."""
        for codebook in self._windows:
            yield self._view(codebook)

    def _view(self, codebook: str) -> CodebookView:
        by_rank = {r: tuple(each) for r, each in sorted(self._windows[codebook].items())}
        site = next((w.site for each in by_rank.values() for w in each if w.site.frames), NOWHERE)
        return CodebookView(codebook, by_rank, site, self.job.numerics)


_NO_WARNING: Final = NothingThere("warnings", "no warning was shown whose cause is known")


class WarningAligner(Aligner):
    """Shows each warning with the ranks that have it, again when another rank does."""

    needs = (Warned,)
    builds = (WarningView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._warned: Recent[Hashable, dict[int, Warned]] = Recent(_MOST_STREAMS)

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was a warning."""
        return {} if self._warned else {WarningView: _NO_WARNING}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one warning of one rank."""
        assert isinstance(event, Warned)
        by_rank = self._warned.of((event.topic, event.site.location), dict)
        if event.rank not in by_rank:
            by_rank[event.rank] = event
            yield WarningView(event.topic, dict(sorted(by_rank.items())))


_NO_MEMORY: Final = NothingThere("measured memory", "the memory of no training step was measured")


class MemoryAligner(Aligner):
    """Shows how memory grows when its samples have doubled, and at the end."""

    needs = (EpochFed, MemoryUse)
    builds = (MemoryView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._samples: dict[str, dict[int, deque[MemoryUse]]] = {}
        self._first_passes: dict[int, int] = {}
        self._pace = _Pace()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether any was measured."""
        return {} if self._samples else {MemoryView: _NO_MEMORY}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one sample of one rank; of one step the last counts."""
        if isinstance(event, EpochFed):
            if event.end >= 0 and event.num_backwards:
                self._first_passes.setdefault(event.rank, event.step)
            return
        assert isinstance(event, MemoryUse)
        by_rank = self._samples.setdefault(event.memory, {})
        samples = by_rank.setdefault(event.rank, deque(maxlen=MOST_VALUES))
        if samples and samples[-1].step == event.step:
            samples.pop()
        samples.append(event)
        if self._pace.is_due((event.rank, event.memory)):
            yield self._view(event.memory)

    def end(self) -> Iterator[View]:
        """Show all samples."""
        for memory in self._samples:
            yield self._view(memory)

    def _view(self, memory: str) -> MemoryView:
        by_rank = {r: tuple(each) for r, each in sorted(self._samples[memory].items())}
        return MemoryView(memory, by_rank, dict(self._first_passes))
