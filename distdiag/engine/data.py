"""What the engine knows of the data that ranks are fed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.augmentations import augmentations
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.engine.relations import ReducedModels
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import Event
from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.data import EpochFed, LoaderResumed, RowsGathered, ScheduleState
from distdiag.events.lifecycle import ProbeDisabled, SteppedAlone
from distdiag.events.models import ModelPlan
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import (
    Alignment,
    EpochView,
    GatheredRowsView,
    LoneStepsView,
    OwnListView,
    ResumedLoaderView,
    SampledEpochView,
    ScheduleView,
)
from distdiag.views.base import View
from distdiag.views.data import PartCounts, ResumedPassView, SampleContentsView
from distdiag.views.relations import AugmentationView

# Which ranks train without anything that connects them, though they were launched together.

_NO_CALL: Final = NothingThere("collectives", "no collective was called")


class LoneStepsAligner(Aligner):
    """Shows ranks that stepped alone, once all have or at the end, and never met before or since.

    A group that was made before is none that connects them: their library may not use it.
    """

    needs = (Collective, GroupCreated, ProbeDisabled, SteppedAlone)
    builds = (LoneStepsView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._alone: dict[int, SteppedAlone] = {}
        self._connected: set[int] = set()
        self._blind: set[int] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether no first step was seen, or not that of some rank."""
        if self._blind:
            why = f"the steps of {RankSet(self._blind).phrase()} are not observed"
            return {LoneStepsView: NotObserved(why)}
        return {} if self._alone or self._connected else {LoneStepsView: _NO_CALL}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case SteppedAlone():
                self._alone[event.rank] = event
                if self._alone.keys() >= set(self.job.world):
                    yield self._view()
            case ProbeDisabled(probe="steps"):
                self._blind.add(event.rank)
            case Collective():
                yield from self._connect(event.rank)
            case GroupCreated() if event.rank in self._alone:
                yield from self._connect(event.rank)

    def end(self) -> Iterator[View]:
        """Show those that stepped, though others never did."""
        if self._alone:
            yield self._view()

    def _connect(self, rank: int) -> Iterator[View]:
        if rank not in self._connected:
            self._connected.add(rank)
            if rank in self._alone:
                yield self._view()

    def _view(self) -> LoneStepsView:
        alone = {r: e for r, e in sorted(self._alone.items()) if r not in self._connected}
        return LoneStepsView("step", ("first",), alone, self.job.world)


# What the samples of a data set hold on each rank, as far as they come again.

_Reads = dict[int, dict[int, list[tuple[str, ...]]]]
"""By index and rank, the digests of the parts each time."""


class SampleContents:
    """The samples that were compared, by stream."""

    def __init__(self) -> None:
        self._reads: Recent[tuple[object, ...], _Reads] = Recent(MOST_FOLLOWED)

    def add(self, by_rank: Mapping[int, EpochFed]) -> SampleContentsView | None:
        """Take in one pass of the ranks; return what is known, if some sample came again."""
        parts = {one.parts for one in by_rank.values() if one.parts}
        if len(parts) != 1:
            return None
        names = parts.pop()
        reads = self._reads.of((by_rank[min(by_rank)].stream, names), dict)
        for rank, one in by_rank.items():
            for index, digests in one.samples:
                reads.setdefault(index, {}).setdefault(rank, []).append(digests)
        counts = tuple(
            _counted(name, reads, place, is_whole=is_whole)
            for place, (name, is_whole) in enumerate(names)
        )
        has_come_again = any(each.num_again or each.num_shared for each in counts)
        return SampleContentsView(by_rank, counts) if has_come_again else None


def _counted(name: str, reads: _Reads, place: int, *, is_whole: bool) -> PartCounts:
    again = changed = shared = different = 0
    for of_ranks in reads.values():
        seen = [{digests[place] for digests in each} for each in of_ranks.values()]
        again += sum(len(each) > 1 for each in of_ranks.values())
        changed += sum(len(each) > 1 for each in seen)
        shared += len(seen) > 1
        different += len(seen) > 1 and len(set.union(*seen)) > 1
    return PartCounts(name, is_whole, again, changed, shared, different)


# The aligner: passes over data sets, evaluations, schedules.

_NO_EPOCH: Final = NothingThere("passes over data sets", "no pass over a data set was seen")
_NO_SAMPLER: Final = NothingThere(
    "samplers of parts or epochs", "no sampler was seen that says its part of the data or its epoch"
)
_NO_LIST: Final = NothingThere(
    "lists of samples",
    "all samplers divide their data set by ranks, or a pass had equal samples, was not read to its "
    "end, or took too long to compare",
)
_NO_ROWS: Final = NothingThere("gathered evaluations", "no rows of a last batch were gathered")
_NO_RESUME: Final = NothingThere("resumed loaders", "no loader that was given a state was used")
_NO_SAMPLE: Final = NothingThere(
    "samples that come again", "no sample of a divided data set was read a second time"
)
_NO_RESUMED_PASS: Final = NothingThere(
    "resumed passes over data sets", "no pass was broken off and taken up again"
)
_NO_FETCH: Final = NothingThere(
    "random numbers of data sets", "nothing was seen to be drawn where samples are fetched"
)
_NO_SCHEDULE: Final = NothingThere(
    "learning-rate schedules", "no schedule of a learning rate was seen"
)
_VIEWS: Final[Mapping[type[Event], type[Alignment[Any]]]] = {
    EpochFed: EpochView,
    ScheduleState: ScheduleView,
    RowsGathered: GatheredRowsView,
    LoaderResumed: ResumedLoaderView,
}
_NEVER: Final[Mapping[type[Event], tuple[type[View], NothingThere]]] = {
    EpochFed: (EpochView, _NO_EPOCH),
    ScheduleState: (ScheduleView, _NO_SCHEDULE),
    RowsGathered: (GatheredRowsView, _NO_ROWS),
    LoaderResumed: (ResumedLoaderView, _NO_RESUME),
}
"""The views of events that were never there, and what is said of them."""


class DataAligner(Aligner):
    """Passes over data sets, schedules, and rows that were gathered."""

    needs = (EpochFed, ScheduleState, RowsGathered, LoaderResumed, ModelPlan)
    builds = (
        EpochView,
        SampledEpochView,
        OwnListView,
        ScheduleView,
        GatheredRowsView,
        ResumedLoaderView,
        ResumedPassView,
        SampleContentsView,
        AugmentationView,
    )

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._events = SideBySide(job.world)
        self._seen: set[type[Event]] = set()
        self._has_sampler = self._has_drawn = self._has_resumed = False
        self._has_come_again = self._has_lists = False
        self._reduced = ReducedModels()
        self._contents = SampleContents()
        self._broken_off: dict[int, EpochFed] = {}
        self._resumed: Recent[tuple[int, str, int], EpochFed] = Recent(MOST_FOLLOWED)

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say what was never there."""
        gaps: dict[type[View | Event], Gap] = {
            view: gap for event, (view, gap) in _NEVER.items() if event not in self._seen
        }
        if not self._has_sampler:
            gaps[SampledEpochView] = gaps.get(EpochView, _NO_SAMPLER)
        if not self._has_lists:
            gaps[OwnListView] = gaps.get(EpochView, _NO_LIST)
        if not self._has_drawn:
            gaps[AugmentationView] = gaps.get(EpochView, _NO_FETCH)
        if not self._has_come_again:
            gaps[SampleContentsView] = gaps.get(EpochView, _NO_SAMPLE)
        if not self._has_resumed:
            gaps[ResumedPassView] = gaps.get(EpochView, _NO_RESUMED_PASS)
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        if isinstance(event, ModelPlan):
            self._reduced.feed(event)
            return
        assert isinstance(event, EpochFed | ScheduleState | RowsGathered | LoaderResumed)
        self._seen.add(type(event))
        if isinstance(event, EpochFed):
            self._follow(event)
        alignment = self._events.add(event)
        if alignment is not None:
            yield from self._show(alignment)

    def _follow(self, one: EpochFed) -> None:
        """Remember a pass that is broken off, and which one goes on where it ended."""
        before = self._broken_off.pop(one.rank, None)
        if before is not None and _goes_on(before, one):
            self._resumed[one.rank, *one.place] = before
            self._resumed.shrink()
        if one.is_trained and not one.is_complete:
            self._broken_off[one.rank] = one

    def end(self) -> Iterator[View]:
        """Show what not all ranks have reached."""
        for alignment in self._events.rest():
            yield from self._show(alignment)

    def _show(self, alignment: Alignment[Any]) -> Iterator[View]:
        yield alignment.show_as(_VIEWS[type(alignment.any_event)], {})
        if isinstance(alignment.any_event, EpochFed):
            yield from self._show_pass(alignment)

    def _show_pass(self, alignment: Alignment[EpochFed]) -> Iterator[View]:
        by_rank = alignment.by_rank
        groups = {self._reduced.all_of(rank) for rank in by_rank}
        are_reduced = len(by_rank) > 1 and len(groups) == 1 and set(*groups) >= set(by_rank)
        if any(map(_is_readable, by_rank.values())):
            self._has_sampler = True
            yield replace(alignment.show_as(SampledEpochView, {}), are_reduced=are_reduced)
        if len(by_rank) > 1 and all(one.least for one in by_rank.values()):
            self._has_lists = True
            yield replace(alignment.show_as(OwnListView, {}), are_reduced=are_reduced)
        fetches = [fetch for each in by_rank.values() for fetch in each.fetches]
        self._has_drawn |= any(fetch.generators for fetch in fetches)
        are_together = are_reduced or all(set(e.members) >= set(by_rank) for e in by_rank.values())
        yield from augmentations(by_rank, are_together=are_together)
        contents = self._contents.add(by_rank)
        if contents is not None:
            self._has_come_again = True
            yield contents
        found = {r: self._resumed.pop((r, *one.place), None) for r, one in by_rank.items()}
        before = {rank: one for rank, one in found.items() if one is not None}
        if before:
            self._has_resumed = True
            yield ResumedPassView(before, {rank: by_rank[rank] for rank in before})


_MOST_AHEAD: Final = 2
"""So many batches a prefetcher takes before the first is trained on; those are not left out."""


def _goes_on(before: EpochFed, after: EpochFed) -> bool:
    """Say whether a pass leaves out as many batches as one of such data had before it ended."""
    kinds = [(one.dataset, one.num_samples, one.sampler.chain) for one in (before, after)]
    num_skipped = after.num_before_training - 1  # the first batch that is trained on is counted
    return (
        kinds[0] == kinds[1]
        and after.is_trained
        and after.sampler.num_skipped == 0
        and num_skipped == before.num_batches > _MOST_AHEAD
    )


def _is_readable(one: EpochFed) -> bool:
    return one.sampler.epoch is not None or one.sampler.num_replicas is not None
