"""What the engine knows of the data that ranks are fed."""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective, GroupCreated, Signature
from distdiag.events.data import EpochFed, ModelFed, RowsGathered, ScheduleState
from distdiag.events.lifecycle import ProbeDisabled, SteppedAlone
from distdiag.events.models import ModelPlan
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import (
    Alignment,
    EpochView,
    GatheredRowsView,
    LoneStepsView,
    ScheduleView,
)
from distdiag.views.base import View
from distdiag.views.data import FeedView, NormalisedFeeds

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


# The aligner: batches, passes over data sets, evaluations, schedules.

_NO_FEED: Final = NothingThere("model inputs", "no model was seen to be fed")
_NO_EPOCH: Final = NothingThere("passes over data sets", "no pass over a data set was seen")
_NO_ROWS: Final = NothingThere("gathered evaluations", "no rows of a last batch were gathered")
_NO_NORMS: Final = NothingThere(
    "batch normalisation", "no layer normalises by the statistics of a batch on one rank"
)
_NO_SCHEDULE: Final = NothingThere(
    "learning-rate schedules", "no schedule of a learning rate was seen"
)
_VIEWS: Final[Mapping[type[Event], type[Alignment[Any]]]] = {
    EpochFed: EpochView,
    ScheduleState: ScheduleView,
    RowsGathered: GatheredRowsView,
}
_NEVER: Final[Mapping[type[Event], tuple[type[View], NothingThere]]] = {
    ModelFed: (FeedView, _NO_FEED),
    EpochFed: (EpochView, _NO_EPOCH),
    ScheduleState: (ScheduleView, _NO_SCHEDULE),
    RowsGathered: (GatheredRowsView, _NO_ROWS),
}
"""The views of events that were never there, and what is said of them."""
_MOST_CALLS: Final = 64
_MOST_PASSES: Final = 8
_REDUCTIONS: Final = ("all_reduce", "allreduce", "reduce")
_NO_EXCHANGES: Final = ("barrier", "broadcast")
_OWN_FILES: Final = ("/torch/distributed/fsdp/", "/torch/nn/", "/torch/optim/", "/deepspeed/")
_FRONTS: Final = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/nn/functional.py",
    "/torch/_ops.py",
    "/contextlib.py",
    "/deepspeed/comm/comm.py",
    "/deepspeed/comm/torch.py",
)
_SHARING: Final = re.compile(
    r"(^|[_\W])(tp|cp|sp|pp|ulysses|ring|(tensor|context|sequence|pipeline|model)\w*)($|[_\W])"
)
"""Names of process groups and axes whose ranks work on the same samples."""


class DataAligner(Aligner):
    """What models were fed, passes over data sets, schedules, and rows that were gathered."""

    needs = (ModelFed, EpochFed, ScheduleState, RowsGathered, Collective, GroupCreated, ModelPlan)
    builds = (FeedView, NormalisedFeeds, EpochView, ScheduleView, GatheredRowsView)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._events = SideBySide(job.world)
        self._feeds = SideBySide(job.world)
        self._seen: set[type[Event]] = set()
        self._has_norms = False
        self._passes: dict[tuple[str, RankSet], deque[Mapping[int, ModelFed]]] = {}
        self._calls: dict[int, deque[tuple[int, int, bool]]] = {}
        self._is_foreign: dict[int, tuple[bool, CallSite]] = {}
        self._sharing: list[frozenset[int]] = []

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say what was never there."""
        gaps: dict[type[View | Event], Gap] = {
            view: gap for event, (view, gap) in _NEVER.items() if event not in self._seen
        }
        if not self._has_norms:
            gaps[NormalisedFeeds] = _NO_NORMS
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        self._seen.add(type(event))
        match event:
            case ModelFed():
                self._has_norms |= event.num_local_norms > 0
                alignment = self._feeds.add(event)
                if alignment is not None and event.members:
                    yield from self._show_feeds(event.model, alignment.by_rank)
            case EpochFed() | ScheduleState() | RowsGathered():
                alignment = self._events.add(event)
                if alignment is not None:
                    yield alignment.show_as(_VIEWS[type(event)], {})
            case Collective():
                self._feed_call(event)
            case GroupCreated() if _SHARING.search(event.desc.lower()):
                self._sharing.append(frozenset(event.ranks))
            case ModelPlan(first=0):
                self._feed_plan(event)

    def end(self) -> Iterator[View]:
        """Show what not all ranks have reached."""
        for alignment in self._events.rest():
            yield alignment.show_as(_VIEWS[type(alignment.any_event)], {})

    def _feed_plan(self, plan: ModelPlan) -> None:
        for mesh in {tensor.mesh for tensor in plan.tensors if tensor.mesh is not None}:
            if any(_SHARING.search(name.lower()) for name in mesh.names):
                self._sharing.append(frozenset(mesh.ranks))

    def _feed_call(self, call: Collective) -> None:
        if call.signature.op.startswith(_NO_EXCHANGES):
            return
        is_reduction = call.signature.op.startswith(_REDUCTIONS)
        num_rows = _num_rows(call.signature)
        if len(call.group.ranks) < 2 or (is_reduction and num_rows < 2):
            return
        known = self._is_foreign.get(id(call.site))
        if known is None:
            # Kept with its site: the id must not come to belong to another one.
            known = self._is_foreign[id(call.site)] = (is_foreign(call.site), call.site)
        if known[0]:
            known_calls = self._calls.setdefault(call.rank, deque(maxlen=_MOST_CALLS))
            known_calls.append((call.seq, num_rows, is_reduction))

    def _show_feeds(self, model: str, by_rank: Mapping[int, ModelFed]) -> Iterator[View]:
        ranks = RankSet(by_rank)
        passes = self._passes.setdefault((model, ranks), deque(maxlen=_MOST_PASSES))
        passes.append(by_rank)
        is_shared = any(len(group & set(ranks)) > 1 for group in self._sharing)
        fed = [fed for each in passes for fed in each.values()]
        is_shared = is_shared or any(map(self._exchanges, fed))
        if len(passes) > 1:
            yield FeedView(model, ranks, tuple(passes), is_shared)
            if self._has_norms:
                yield NormalisedFeeds(model, ranks, tuple(passes), is_shared)

    def _exchanges(self, fed: ModelFed) -> bool:
        """Say whether a rank has sent more than gradients and parameters for these samples."""
        fewest = min(fed.batch_sizes, default=0)
        for seq, num_rows, is_reduction in self._calls.get(fed.rank, ()):
            if fed.begin <= seq < fed.end and not is_reduction:
                return True
            # Before the forward pass: what was found for each sample, such as rewards of answers.
            if 0 <= fed.since <= seq < fed.begin and num_rows >= max(fewest, 2):
                return True
        return False


def _num_rows(signature: Signature) -> int:
    """Return how many rows the tensors have that a rank gives, 0 for single figures."""
    return max((sizes[0] for sizes in signature.input_sizes if sizes), default=0)


def is_foreign(site: CallSite) -> bool:
    """Say whether something else than a wrapper, a norm or an optimizer of torch's calls."""
    caller = next((f.file for f in site.frames if not f.file.endswith(_FRONTS)), "")
    return not any(own in caller for own in _OWN_FILES)
