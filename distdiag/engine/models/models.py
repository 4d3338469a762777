"""What the engine knows of models: plans, contents and gradients, put side by side."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from distdiag.engine.bounded import MOST_FOLLOWED, Forgotten, Recent, Turns
from distdiag.engine.models.replicas import InferredReplicas, ParallelGroups
from distdiag.events.base import CallSite, Event
from distdiag.events.models import (
    Content,
    ModelPlan,
    ModelState,
    Moment,
    ReplicaEvidence,
    TensorPlan,
    kept_ranks,
    reducing_ranks,
)
from distdiag.events.ranks import RankSet
from distdiag.views.models import (
    ContentView,
    Disagreement,
    LaterContents,
    ModelView,
    ModelViews,
    ReplicaView,
    ScalingView,
)

# Stages of a pipeline, distinguished from copies of one model by the names of their tensors.

WAYS_OF_DDP: Final = (ReplicaEvidence.UNSYNCED, ReplicaEvidence.BYPASSED)

Plans = tuple[TensorPlan, ...]
Seen = Mapping[int, tuple[TensorPlan, Content]]


def by_evidence(
    evidence: ReplicaEvidence, names: Mapping[str, Seen], plans: Mapping[int, Plans]
) -> dict[ReplicaEvidence, dict[str, Seen]]:
    """Return the tensors that all these ranks have, by what tells that they hold the same."""
    whole = {name: seen for name, seen in names.items() if _is_whole(seen, len(plans))}
    found = {plan.evidence for seen in whole.values() for plan, _ in seen.values()}
    # What any of the ranks knows of how DDP was used holds for all of them.
    evidence = next((each for each in WAYS_OF_DDP if each in found), evidence)
    if evidence is not ReplicaEvidence.MARKED or not stages_in(plans):
        return {evidence: whole}
    # The layers of stages have the same names, and are not the same.
    shared = {name: seen for name, seen in whole.items() if is_shared(seen)}
    return {
        evidence: shared,
        ReplicaEvidence.WORLD: {n: whole[n] for n in whole if n not in shared},
    }


def stages_in(plans: Mapping[int, Plans]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks whose models have the same tensors, empty if all ranks' models do.

    Tensors that some of them share tell nothing.
    """
    stages: dict[frozenset[str], list[int]] = {}
    for rank, each in plans.items():
        own = frozenset(plan.name for plan in each if not plan.is_shared)
        stages.setdefault(own, []).append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in stages.values()) if len(stages) > 1 else ()


def is_shared(seen: Seen) -> bool:
    """Say whether some stages share a tensor, under names of their own."""
    return any(plan.is_shared for plan, _ in seen.values())


def _is_whole(seen: Seen, num_ranks: int) -> bool:
    return len(seen) == num_ranks or (is_shared(seen) and len(seen) > 1)


# Puts the parts of plans and states of models together again, for each rank.

Key = tuple[str, Moment, int, int]
"""A model, a moment, a step, and how often it had come in that step before."""


@dataclass(slots=True)
class _Reported:
    """One model of one rank; `counts` says how often a moment came in the last step that had it."""

    plans: tuple[TensorPlan, ...] = ()
    plan_parts: list[TensorPlan] = field(default_factory=list)
    state_parts: dict[Moment, list[Content | None]] = field(default_factory=dict)
    counts: dict[Moment, tuple[int, int]] = field(default_factory=dict)


class RankModels:
    """The newest models of one rank as far as they have been reported."""

    def __init__(self, forgotten: Forgotten | None = None) -> None:
        """Begin with none; `forgotten` is told of those that are too many."""
        self._models: Recent[str, _Reported] = Recent(MOST_FOLLOWED, "models", forgotten)

    @property
    def plans(self) -> dict[str, Plans]:
        """The plans of all models that have one."""
        return {name: model.plans for name, model in self._models.items() if model.plans}

    def plan_of(self, model: str) -> Plans:
        """Return the plan of a model, as it was reported last; empty if there is none."""
        known = self._models.get(model)
        return known.plans if known is not None else ()

    def add_plan(self, event: ModelPlan) -> bool:
        """Take in a part of a plan; return whether the plan is complete now."""
        model = self._models.of(event.model, _Reported)
        parts = model.plan_parts
        if event.first == 0:
            parts.clear()
        parts += event.tensors
        if event.first + len(event.tensors) < event.total or len(parts) != event.total:
            return False
        model.plans = tuple(parts)
        parts.clear()
        return True

    def add_state(self, event: ModelState) -> tuple[Key, list[Content | None]] | None:
        """Take in a part of a state; return the state when it is complete and its plan is known."""
        if event.model not in self._models:
            return None
        model = self._models.of(event.model, _Reported)
        parts = model.state_parts.setdefault(event.moment, [])
        if event.first == 0:
            parts.clear()
        parts += event.contents
        if event.first + len(event.contents) < event.total or len(parts) != event.total:
            return None
        del model.state_parts[event.moment]
        if len(model.plans) != event.total:
            return None
        step, count = model.counts.get(event.moment, (event.step, -1))
        count = count + 1 if step == event.step else 0
        model.counts[event.moment] = event.step, count
        return (event.model, event.moment, event.step, count), parts


# Compares plans, contents and gradients of all ranks.

FEWEST: Final = 8
MOST_OPEN: Final = 16
"""So many moments may wait for further ranks; the oldest are given up."""
_MOST_BEGUN: Final = 4 * MOST_FOLLOWED

ROUNDING: Final = {
    Moment.START: -1.0,
    Moment.STEP: 1e-5,
    Moment.GRADIENT: 1e-3,
    Moment.EVALUATION: 1e-5,
}
"""Ranks may differ by so much, relative to the largest value, once they have computed."""

_SPREAD: Final = 0.02


@dataclass(slots=True)
class _State:
    plans: tuple[TensorPlan, ...]
    contents: Sequence[Content | None]
    site: CallSite

    def expected(self) -> set[int]:
        return kept_ranks(self.plans).union(*(plan.replicas for plan in self.plans))

    def held(self) -> tuple[tuple[TensorPlan, Content], ...]:
        pairs = zip(self.plans, self.contents, strict=True)
        return tuple((plan, content) for plan, content in pairs if content is not None)


class Models:
    """Feed the events of models as they come; each yields the views that it completes."""

    def __init__(
        self,
        parallel: ParallelGroups | None = None,
        *,
        num_ranks: int = 0,
        forgotten: Forgotten | None = None,
    ) -> None:
        """Know of no model yet; `parallel` sees what all ranks hold in their first steps."""
        self._parallel = parallel or ParallelGroups()
        self._inferred = InferredReplicas()
        self._forgotten = forgotten
        self._ranks: dict[int, RankModels] = {}
        self._open: dict[Key, dict[int, _State]] = {}
        self._begun: Turns[str] = Turns(num_ranks, _MOST_BEGUN, forgotten=forgotten)
        self._starts: Recent[tuple[str, int], dict[int, tuple[Plans, CallSite]]]
        self._starts = Recent(MOST_FOLLOWED)
        self._gradients: Recent[str, dict[int, tuple[int, _State]]] = Recent(MOST_FOLLOWED)
        self._scalings: Recent[tuple[str, int], dict[int, float]] = Recent(MOST_FOLLOWED)
        self._shown: Recent[str, set[tuple[Moment, ReplicaEvidence, RankSet, bool]]]
        self._shown = Recent(_MOST_BEGUN)
        # Longer than plans: what is compared was begun, and alike then if it was.
        self._alike: Recent[str, dict[tuple[str, RankSet], int]] = Recent(_MOST_BEGUN)
        self.compared: set[Moment] = set()
        """The moments at which copies of a tensor were put side by side."""

    def feed(self, event: Event) -> Iterator[ModelViews]:
        """Take in one event of one rank."""
        if isinstance(event, ModelPlan):
            is_complete = self._of(event.rank).add_plan(event)
            if is_complete and event.moment is Moment.START:
                yield from self._plans(event)
        elif isinstance(event, ModelState):
            yield from self._feed_state(event)

    def plans(self) -> Mapping[int, Mapping[str, Plans]]:
        """Return the last plan of each model, by rank."""
        return {rank: models.plans for rank, models in self._ranks.items()}

    def _of(self, rank: int) -> RankModels:
        return self._ranks.setdefault(rank, RankModels(self._forgotten))

    def plans_of(self, rank: int) -> Iterator[TensorPlan]:
        """Yield the plans of all tensors of a rank, as it reported them last."""
        for plans in self._of(rank).plans.values():
            yield from plans

    # Plans

    def _plans(self, event: ModelPlan) -> Iterator[ModelViews]:
        """Compare the plans with which a model was begun; it may begin again, wrapped anew."""
        count = self._begun.next(event.model, event.rank)
        if count is None:
            return
        starts = self._starts.of((event.model, count), dict)
        starts[event.rank] = (self._of(event.rank).plan_of(event.model), event.site)
        groups = {frozenset(kept_ranks(plans)) for plans, _ in starts.values()}
        for group in sorted(groups, key=sorted):
            if len(group) > 1 and event.rank in group and group <= starts.keys():
                by_rank = {rank: starts[rank][0] for rank in sorted(group)}
                sites = {rank: starts[rank][1] for rank in sorted(group)}
                yield ModelView(event.model, event.moment, event.step, by_rank, sites)

    # Contents

    def _feed_state(self, event: ModelState) -> Iterator[ModelViews]:
        models = self._of(event.rank)
        complete = models.add_state(event)
        if complete is None:
            return
        key, contents = complete
        state = _State(models.plan_of(event.model), contents, event.site)
        yield from self._gradient(event, state)
        if event.moment is Moment.BACKWARD:
            return
        states = self._open.setdefault(key, {})
        states[event.rank] = state
        expected = state.expected() | {event.rank}
        if event.moment is Moment.START:
            yield from self._contents(key, states, expected)
        elif event.moment is Moment.STEP and any(plan.is_ignored for plan in state.plans):
            for view in self._contents(key, states, expected):
                yield view.narrowed(LaterContents)
        yield from self._compare(key, states, state)
        yield from self._parallel.add(key[:3], event.rank, state.held(), event.site)
        yield from self._inferred.add(key[:3], event.rank, state.held(), event.site)
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _contents(
        self, key: Key, states: Mapping[int, _State], expected: set[int]
    ) -> Iterator[ContentView]:
        if expected <= states.keys():
            held = {rank: states[rank].held() for rank in sorted(expected)}
            sites = {rank: states[rank].site for rank in sorted(expected)}
            yield ContentView(key[0], key[2], held, sites)

    def _compare(
        self, key: Key, states: Mapping[int, _State], newest: _State
    ) -> Iterator[ModelViews]:
        """Compare the tensors of which the newest state is the last one to come."""
        model, moment, step, _ = key
        groups = {
            (_evidence(plan), plan.replicas) for plan in newest.plans if len(plan.replicas) > 1
        }
        for evidence, ranks in sorted(groups):
            if not states.keys() >= set(ranks):
                continue
            names: dict[str, dict[int, tuple[TensorPlan, Content]]] = {}
            for rank in ranks:
                for plan, content in states[rank].held():
                    if (_evidence(plan), plan.replicas) == (evidence, ranks) and not plan.tied_to:
                        names.setdefault(_common_name(plan), {})[rank] = (plan, content)
            plans = {rank: states[rank].plans for rank in ranks}
            sites = {rank: states[rank].site for rank in ranks}
            for known, whole in by_evidence(evidence, names, plans).items():
                if whole:
                    self.compared.add(moment)
                view = ReplicaView(
                    model, moment, step, known, RankSet(ranks), (), len(whole), sites=sites
                )
                yield from self._judge_group(view, whole)
            if evidence is ReplicaEvidence.MARKED:
                view = ReplicaView(
                    model, moment, step, evidence, RankSet(ranks), (), 0, sites=sites
                )
                yield from self._stages(view, names, plans)

    def _stages(
        self, view: ReplicaView, names: Mapping[str, Seen], plans: Mapping[int, Plans]
    ) -> Iterator[ModelViews]:
        """Judge the stages of a pipeline, each by itself, once reductions tell that it is one."""
        for ranks in stages_in(plans):
            if len(ranks) < 2:
                continue
            of_stage = {
                name: {rank: seen[rank] for rank in ranks}
                for name, seen in names.items()
                if seen.keys() >= set(ranks) and not is_shared(seen)
            }
            sites = {rank: view.sites[rank] for rank in ranks}
            own = replace(view, ranks=RankSet(ranks), num_compared=len(of_stage), sites=sites)
            views = tuple(self._judge_group(own, of_stage))
            # At the start nothing was reduced yet: what was alike then is only taken note of.
            if self._parallel.are_joined(ranks):
                yield from views

    def _judge_group(self, view: ReplicaView, names: Mapping[str, Seen]) -> Iterator[ModelViews]:
        """Show what differs: once what was alike before, and once what never was."""
        differing: dict[bool, list[tuple[Disagreement, int | None]]] = {True: [], False: []}
        alike = self._alike.of(view.model, dict)
        for name, seen in names.items():
            plan = next(iter(seen.values()))[0]
            is_kept = plan.is_parameter or plan.is_routing_bias
            if view.moment not in (Moment.START, Moment.EVALUATION) and not is_kept:
                continue  # statistics of the data that each rank has seen
            found = Disagreement(plan, {rank: content for rank, (_, content) in seen.items()})
            place = (f"{view.moment}:{name}", view.ranks)
            if is_alike(found.by_rank):
                alike[place] = view.step
            elif are_comparable(found.by_rank) and found.difference > ROUNDING[view.moment]:
                start = alike.get((f"{Moment.START}:{name}", view.ranks))
                alike_at = alike.get(place, start)
                differing[alike_at is None].append((found, alike_at))
        for is_new, pairs in differing.items():
            shown = (view.moment, view.evidence, view.ranks, is_new)
            if pairs and shown not in self._shown.get(view.model, ()):
                self._shown.of(view.model, set).add(shown)
                known = [step for _, step in pairs if step is not None]
                tensors = tuple(found for found, _ in pairs)
                yield replace(view, tensors=tensors, alike_at=max(known, default=None))

    # Gradients

    def _gradient(self, event: ModelState, state: _State) -> Iterator[ModelViews]:
        gradients = self._gradients.of(event.model, dict)
        if event.moment is Moment.BACKWARD:
            gradients[event.rank] = (event.step, state)
        elif event.moment is Moment.GRADIENT:
            step, before = gradients.get(event.rank, (-1, state))
            factor = scaling(before.contents, state.contents) if step == event.step else None
            group = kept_ranks(state.plans)
            if not group and any(plan.wrapper for plan in state.plans):
                group = reducing_ranks(state.plans)  # the program does so once more
            if factor is None or len(group) < 2:
                return
            by_rank = self._scalings.of((event.model, event.step), dict)
            by_rank[event.rank] = factor
            if group <= by_rank.keys():
                del self._scalings[event.model, event.step]
                mine = {rank: by_rank[rank] for rank in sorted(group)}
                sites = {event.rank: event.site}
                size = sum(each.num_elements for _, each in state.held())
                yield ScalingView(event.model, event.step, mine, sites, size)


def _common_name(plan: TensorPlan) -> str:
    return f"shared {plan.shape}" if plan.is_shared else plan.name


def _evidence(plan: TensorPlan) -> ReplicaEvidence:
    return ReplicaEvidence.WRAPPER if plan.evidence in WAYS_OF_DDP else plan.evidence


def is_alike(contents: Mapping[int, Content]) -> bool:
    """Say whether all ranks hold the same bytes."""
    return len({content.digest for content in contents.values()}) == 1


def are_comparable(contents: Mapping[int, Content]) -> bool:
    """Say whether the digests were made in the same way."""
    return len({content.digest[:1] for content in contents.values()}) == 1


def scaling(before: Sequence[Content | None], after: Sequence[Content | None]) -> float | None:
    """Return the one factor by which gradients were multiplied, None if it is not one factor."""
    pairs = [
        (early, late)
        for early, late in zip(before, after, strict=False)
        if early is not None and late is not None and peak(early) not in (0.0, math.inf)
    ]
    if all(early.num_elements < FEWEST for early, _ in pairs):
        return None  # of a few numbers any change is a factor
    factors = [peak(late) / peak(early) for early, late in pairs if peak(late) != math.inf]
    if not factors or len(factors) < len(pairs):
        return None
    middle = statistics.median(factors)
    if middle <= 0 or not all(_is_scaled(early, late, middle) for early, late in pairs):
        return None
    return middle


def _is_scaled(early: Content, late: Content, factor: float) -> bool:
    rounding = _SPREAD * peak(late)
    return all(
        abs(getattr(late, figure) - factor * getattr(early, figure)) <= rounding
        for figure in ("least", "greatest", "mean")
    )


def peak(content: Content) -> float:
    """Return the largest absolute value, infinite if there is no finite one."""
    largest = max(abs(content.least), abs(content.greatest))
    return math.inf if math.isnan(largest) else largest
