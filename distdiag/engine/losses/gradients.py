"""Puts gradients of all ranks side by side, with the exchanges that their autograd nodes made."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import SinceFirst
from distdiag.engine.collectives.traffic import Surplus
from distdiag.engine.losses.feeds import Feeds
from distdiag.engine.losses.same_work import same_work_view
from distdiag.engine.losses.sums import FEWEST_STEPS, FIRST_STEPS, KnownModel, sums_views
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective
from distdiag.events.data import EpochFed, ModelFed
from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import ProbeDisabled, StepEnd
from distdiag.events.models import ModelPlan, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.contributions import (
    ContributionView,
    contributions_of,
    copies_in,
    is_frozen,
    is_left_over,
    own_factor,
)
from distdiag.views.gradients import (
    GradientSample,
    GradientView,
    Ranks,
    SameWorkView,
    StageScalings,
    SumsView,
)

_NO_EXCHANGE: Final = NothingThere("experts", "no gradient was seen that passes an all-to-all")
_NO_GRADIENT: Final = NothingThere(
    "gradients", "no parameters were trained by several ranks, each with a gradient of its own"
)
_NONE: Final[Mapping[type[View | Event], Gap]] = {
    SameWorkView: NothingThere(
        "tensor-parallel gradients", "no ranks were given the same and exchanged activations"
    ),
    StageScalings: NothingThere(
        "stages of pipelines", "no ranks sent each other activations and their gradients"
    ),
}
_MOST_MODELS: Final = 16
"""Of so many models the first samples are kept: each holds the gradients of all ranks."""
_MOST_SAMPLES: Final = 8
_MOST_OPEN: Final = 32
_MOST_CALLS: Final = 4096
_REDUCING: Final = ("all_reduce", "reduce_scatter")
_GATHERING: Final = (*_REDUCING, "all_gather")
_UNPLACED: Final = (ReplicaEvidence.WORLD, ReplicaEvidence.REDUCED, ReplicaEvidence.SENT)


class _Told(NamedTuple):
    """What one rank tells of one step, and what it issued in each of its nodes."""

    event: GradientSums
    exchanges: tuple[Ranks, ...]
    gathers: tuple[Ranks, ...]


class GradientAligner(Aligner):
    """Sums over gradients; a step is shown when those of all ranks are there."""

    needs = (GradientSums, Collective, ModelPlan, StepEnd, ProbeDisabled, ModelFed, EpochFed)
    builds = (GradientView, ContributionView, SumsView, SameWorkView, StageScalings)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._world = frozenset(job.world)
        self._calls: dict[int, dict[int, Ranks]] = {rank: {} for rank in job.world}
        self._gathers: dict[int, dict[int, Ranks]] = {rank: {} for rank in job.world}
        self._groups: set[Ranks] = set()
        self._open: dict[tuple[str, int], dict[int, _Told]] = {}
        self._models: SinceFirst[str, KnownModel]
        self._models = SinceFirst(_MOST_MODELS, "models with gradients", job.forgotten)
        self._surplus = Surplus(FIRST_STEPS)
        self._feeds = Feeds()
        self._factors: dict[int, dict[int, list[float | None]]] = {}
        self._sites: dict[int, CallSite] = {}
        self._shown: set[type[View]] = set()
        self._num_steps = 0
        self._has_exchanged = False
        self._blind: set[int] = set()
        self._unread: set[str] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether no gradient was seen behind an all-to-all, or not all."""
        if self.job.only_start:
            return dict.fromkeys(self.builds, LIGHT)
        if self._blind or self._unread:
            whose = " and ".join([*sorted(self._unread), *self._blind_ranks()])
            why = NotObserved(f"the gradients of {whose} are not observed wholly")
            return dict.fromkeys(self.builds, why)
        gaps: dict[type[View | Event], Gap] = {}
        if not self._has_exchanged:
            gaps[GradientView] = _NO_EXCHANGE
        if not any(model.found for model in self._models.values()):
            gaps |= dict.fromkeys((ContributionView, SumsView), _NO_GRADIENT)
        gaps |= {view: gap for view, gap in _NONE.items() if view not in self._shown}
        return gaps

    def _blind_ranks(self) -> Iterator[str]:
        if self._blind:
            yield RankSet(self._blind).phrase()

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self._note(event)
                self._feeds.feed(event)
            case ModelFed() | EpochFed():
                self._feeds.feed(event)
            case ProbeDisabled(probe="gradient-sums"):
                self._blind.add(event.rank)
            case StepEnd():
                self._num_steps = max(self._num_steps, event.step + 1)
            case ModelPlan():
                self._add_plan(event)
            case GradientSums():
                yield from self._add(event)

    def _add_plan(self, event: ModelPlan) -> None:
        known = self._models.find(event.model, KnownModel)
        if known is None:
            return
        plans = known.plans.setdefault(event.rank, {})
        for plan in event.tensors:
            if plans.setdefault(plan.name, plan).evidence in _UNPLACED:
                plans[plan.name] = plan

    def _note(self, call: Collective) -> None:
        self._surplus.add(call)
        op = call.signature.op
        if op.startswith("all_to_all"):
            _keep(self._calls[call.rank], call)
        elif op.startswith(_GATHERING):
            _keep(self._gathers[call.rank], call)
        if op.startswith(_REDUCING):
            self._groups.add(tuple(sorted(call.group.ranks)))

    def _add(self, event: GradientSums) -> Iterator[View]:
        key = (event.model, event.step)
        exchanges, gathers = (
            tuple(_groups_of(calls[event.rank], *node.calls) for node in event.nodes)
            for calls in (self._calls, self._gathers)
        )
        self._has_exchanged = self._has_exchanged or any(exchanges)
        self._unread |= {event.unread} - {""}
        if len(self._factors) < _MOST_SAMPLES or event.step in self._factors:
            factors = self._factors.setdefault(event.step, {})
            factors.setdefault(event.rank, []).append(own_factor(event))
            self._sites.setdefault(event.rank, event.site)
        by_rank = self._open.setdefault(key, {})
        by_rank[event.rank] = _Told(event, exchanges, gathers)
        if by_rank.keys() >= self._world:
            yield from self._views(event.model, event.step)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _views(self, model: str, step: int) -> Iterator[View]:
        seen = self._open.pop((model, step))
        known = self._models.find(model, KnownModel)
        if known is None:
            return
        by_rank = {rank: each.event for rank, each in sorted(seen.items())}
        sample = GradientSample(
            step,
            by_rank,
            {rank: each.exchanges for rank, each in seen.items()},
            frozenset(self._groups),
            {rank: each.gathers for rank, each in seen.items()},
        )
        if len(known.samples) < _MOST_SAMPLES:  # the first ones: those that come later are few
            before = known.samples[-1] if known.samples else None
            is_next = before is not None and before.step == step - 1
            earlier = before.by_rank if before is not None and is_next else {}
            if is_left_over(earlier, by_rank):
                known.stale.add(step)
            if known.samples and is_frozen(known.samples[0].by_rank, by_rank):
                known.frozen.add(step)
            known.samples += (sample,)
            known.found += contributions_of(step, by_rank, earlier)
        yield self._gradients(model, known)
        if known.found:
            yield self._contributions(model, known)
            if step >= FIRST_STEPS:
                yield from sums_views(model, known, self._surplus, self._feeds)

    def _gradients(self, model: str, known: KnownModel) -> GradientView:
        ranks = RankSet(rank for each in known.samples for rank in each.by_rank)
        placed = {
            name
            for plans in known.plans.values()
            for name, plan in plans.items()
            if plan.evidence not in _UNPLACED
        }
        return GradientView(model, ranks, known.samples, frozenset(placed))

    def _contributions(self, model: str, known: KnownModel) -> ContributionView:
        events = known.samples[0].by_rank
        return ContributionView(
            model,
            RankSet(rank for each in known.samples for rank in each.by_rank),
            tuple(known.found),
            events,
            copies_in(events),
            {name: plan for plans in known.plans.values() for name, plan in plans.items()},
            frozenset(known.stale),
            frozenset(known.frozen),
        )

    def end(self) -> Iterator[View]:
        """Show what not all ranks have reached, and all sums: more is known of what was sent."""
        for model, step in list(self._open):
            yield from self._views(model, step)
        for model, known in self._models.items():
            if self._num_steps >= FEWEST_STEPS and known.found:
                yield from sums_views(model, known, self._surplus, self._feeds)
            for ranks in self._feeds.working_alike():
                view = same_work_view(model, ranks, known)
                if view is not None:
                    self._shown.add(SameWorkView)
                    yield view
        yield from self._stages()

    def _stages(self) -> Iterator[View]:
        found: dict[Ranks, dict[int, Mapping[int, float]]] = {}
        for step, factors in self._factors.items():
            one = {rank: each[0] for rank, each in factors.items() if len(set(each)) == 1}
            known = {rank: factor for rank, factor in one.items() if factor is not None}
            for ranks in self._feeds.stages(step):
                if known.keys() >= set(ranks):
                    found.setdefault(ranks, {})[step] = {rank: known[rank] for rank in ranks}
        for ranks, by_step in found.items():
            self._shown.add(StageScalings)
            yield StageScalings(ranks, by_step, {rank: self._sites[rank] for rank in ranks})


def _keep(calls: dict[int, Ranks], call: Collective) -> None:
    calls[call.seq] = tuple(sorted(call.group.ranks))
    if len(calls) > _MOST_CALLS:
        del calls[next(iter(calls))]


def _groups_of(calls: dict[int, Ranks], first: int, last: int) -> Ranks:
    """Return the ranks that the calls with these numbers went over, if it is one group."""
    found = {calls[seq] for seq in range(first, last) if seq in calls}
    return found.pop() if len(found) == 1 else ()
