"""Puts the steps of optimizers and gradient scalers of all ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.events.base import Event
from distdiag.events.models import ModelPlan, kept_ranks, reducing_ranks
from distdiag.events.updates import (
    CastsReused,
    OptimizerUpdate,
    PositionsRounded,
    ReducedInType,
    ScalerStep,
)
from distdiag.views.base import View
from distdiag.views.updates import (
    CastsView,
    Looks,
    PositionsView,
    ReductionView,
    ScalerView,
    SeenView,
    SkippingView,
    UpdateView,
)

_NO_STEP: Final = NothingThere("optimizer steps", "no optimizer step with gradients was looked at")
_NO_SCALER: Final = NothingThere("gradient scalers", "no gradient scaler was used")
_NO_FSDP: Final = NothingThere(
    "reductions over a second axis",
    "no gradient was summed over an axis of a mesh beside that of FSDP2",
)
_NO_POSITIONS: Final = NothingThere(
    "rounded position tables", "no cast rounded a buffer whose module computes angles"
)
_NO_AUTOCAST: Final = NothingThere(
    "steps within autocast", "no optimizer stepped inside an autocast region"
)
_VIEWS: Final[Mapping[type[Event], type[SeenView[Any]]]] = {
    ReducedInType: ReductionView,
    PositionsRounded: PositionsView,
    CastsReused: CastsView,
}
_MOST_LOOKS: Final = 64
_MOST_OPEN: Final = 4096

_Optimizer = tuple[str, str]


class UpdateAligner(Aligner):
    """Shows the looked-at steps of an optimizer when all ranks have taken the same one."""

    needs = (OptimizerUpdate, ReducedInType, PositionsRounded, CastsReused)
    builds = (UpdateView, ReductionView, PositionsView, CastsView)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._looks: Recent[_Optimizer, dict[int, Looks]]
        self._looks = Recent(MOST_FOLLOWED, "steps of optimizers", job.forgotten)
        self._shown: Recent[_Optimizer, int] = Recent(4 * MOST_FOLLOWED)
        self._seen: dict[type[Event], Recent[str, dict[int, Event]]] = {}

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say what was never there."""
        never: dict[type[Event], tuple[type[View | Event], Gap]] = {
            ReducedInType: (ReductionView, _NO_FSDP),
            PositionsRounded: (PositionsView, _NO_POSITIONS),
            CastsReused: (CastsView, _NO_AUTOCAST),
        }
        gaps = {view: gap for kind, (view, gap) in never.items() if kind not in self._seen}
        if not self._looks:
            gaps[UpdateView] = LIGHT if self.job.only_start else _NO_STEP
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in a step that one rank has looked at."""
        if not isinstance(event, OptimizerUpdate):
            yield from self._note(event)
            return
        key = (event.optimizer, event.model)
        by_rank = self._looks.of(key, dict)
        by_rank[event.rank] = (*by_rank.get(event.rank, ()), event)[-_MOST_LOOKS:]
        number = min(looks[-1].number for looks in by_rank.values())
        if by_rank.keys() >= set(self.job.world) and number > self._shown.get(key, -1):
            self._shown.pop(key, None)
            self._shown[key] = number
            self._shown.shrink()
            yield self._view(by_rank, number)

    def end(self) -> Iterator[View]:
        """Show the optimizers that not all ranks have, or not all have stepped as often."""
        for key, by_rank in self._looks.items():
            number = max(looks[-1].number for looks in by_rank.values())
            if number > self._shown.get(key, -1):
                yield self._view(by_rank, number)
        for kind, subjects in self._seen.items():
            for seen in subjects.values():
                if not seen.keys() >= set(self.job.world):
                    yield _VIEWS[kind](dict(sorted(seen.items())))

    def _note(self, event: Event) -> Iterator[View]:
        """Take in what a rank has seen of a thing that is the same on all of them."""
        subject = getattr(event, "parameter", "") or getattr(event, "buffer", "")
        subjects = self._seen.setdefault(type(event), Recent(_MOST_OPEN))
        by_rank = subjects.of(subject, dict)
        is_new = event.rank not in by_rank
        by_rank.setdefault(event.rank, event)
        if is_new and by_rank.keys() >= set(self.job.world):
            yield _VIEWS[type(event)](dict(sorted(by_rank.items())))

    def _view(self, by_rank: Mapping[int, Looks], number: int) -> UpdateView:
        shown = {
            rank: tuple(look for look in looks if look.number <= number)
            for rank, looks in sorted(by_rank.items())
        }
        return UpdateView(
            {rank: looks for rank, looks in shown.items() if looks}, self.job.numerics
        )


class ScalerAligner(Aligner):
    """Compares, call by call, whether ranks that train together skip the same steps."""

    needs = (ScalerStep, ModelPlan)
    builds = (ScalerView, SkippingView)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._groups: dict[int, set[frozenset[int]]] = {}
        self._open: dict[tuple[str, str, int], dict[int, ScalerStep]] = {}
        self._last: Recent[str, dict[int, ScalerStep]] = Recent(MOST_FOLLOWED)

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was any scaler."""
        return {} if self._last else {ScalerView: _NO_SCALER, SkippingView: _NO_SCALER}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in a call of one rank."""
        if isinstance(event, ModelPlan):
            self._know(event)
            return
        assert isinstance(event, ScalerStep)
        key = (event.scaler, event.optimizer, event.number)
        steps = self._open.setdefault(key, {})
        steps[event.rank] = event
        last = self._last.of(event.scaler, dict)
        last[event.rank] = event
        if event.is_skipped:
            yield SkippingView(dict(sorted(last.items())))
        ranks, are_together = self._group_of(event.rank)
        if steps.keys() >= ranks:
            yield from _compared({rank: steps[rank] for rank in ranks}, are_together)
            if steps.keys() >= set(self.job.world):
                del self._open[key]
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _know(self, plan: ModelPlan) -> None:
        if any(tensor.requires_grad for tensor in plan.tensors):
            ranks = kept_ranks(plan.tensors) or reducing_ranks(plan.tensors)
            ranks = ranks.union(*(tensor.split_over for tensor in plan.tensors))
            if plan.rank in ranks and len(ranks) > 1:
                self._groups.setdefault(plan.rank, set()).add(frozenset(ranks))

    def _group_of(self, rank: int) -> tuple[frozenset[int], bool]:
        """Return the ranks that train with this one, and whether that is known."""
        groups = self._groups.get(rank, set())
        if len(groups) == 1:
            return next(iter(groups)), True
        return frozenset(self.job.world), False


def _compared(steps: Mapping[int, ScalerStep], are_together: bool) -> Iterator[View]:
    if len({step.is_skipped for step in steps.values()}) > 1:
        yield ScalerView(dict(sorted(steps.items())), are_together)
