"""Copies that drift apart, and whether anything ever passes between their ranks that mends it.

Steps on gradients of one's own may be intended: weights are averaged now and then, or a compressed
change is sent round. Whoever means them sends something of the size of the model sooner or later.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.engine.collectives.traffic import Traffic, carried_bytes, element_bytes
from distdiag.engine.ranks import RECORDS_OF_CALLS
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.lifecycle import EventsLost, Finished, ProbeDisabled, StepEnd
from distdiag.events.models import Content, Moment, ReplicaEvidence, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.views.experts import is_of_expert, layer_of, spreading_routers
from distdiag.views.models import Disagreement, ReplicaView

# What ranks have done with the copies of a gradient or parameter, as contents tell.

Copies = Mapping[int, tuple[TensorPlan, Content]]
"""A tensor as each rank plans and holds it."""

_ROUNDING: Final = 1e-3
"""Gradients that ranks have computed from the same may differ by so much."""


def are_equal(copies: Copies) -> bool:
    """Say whether all ranks hold the same bytes."""
    return len(_digests(copies)) == 1


def _digests(copies: Copies) -> set[str]:
    return {content.digest for _, content in copies.values()}


# Ranks whose gradients stay their own while other groups of the same split reduce theirs.

FIRST_STEPS: Final = 3
_LEAST_BYTES: Final = 256
_OF_THE_DEFAULT: Final = ("init_process_group", "destroy_process_group")
_REDUCING: Final = ("all_reduce", "reduce_scatter")

Held = Mapping[str, tuple[TensorPlan, Content]]
_Group = tuple[int, ...]
_Family = tuple[object, ...]


@dataclass(slots=True)
class _Sample:
    """What the ranks held at one moment of one step: trainable parameters of each model."""

    held: dict[int, dict[str, Held]] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)


class ParallelGroups:
    """Finds groups that were made by the same split, some of which reduce gradients.

    A stage of a pipeline that reduces its gradients over its data-parallel group tells that the
    other stages should do the same over theirs.
    """

    def __init__(self) -> None:
        self._families: dict[_Family, list[_Group]] = {}
        self._carried: dict[_Group, int] = {}
        self._reducing: set[_Group] = set()
        self._samples: dict[tuple[Moment, int], _Sample] = {}
        self._shown: set[tuple[str, _Group]] = set()

    def feed_group(self, event: GroupCreated) -> None:
        """Take note of a group that is made; those made by one line in one way are a family."""
        is_new = not event.done and event.api not in _OF_THE_DEFAULT
        if not is_new or event.step > FIRST_STEPS:  # what it carries later is not counted
            return
        where = event.site.location
        line = (where.file, where.line) if where is not None else None
        family = (event.rank, event.generation, event.scope, event.desc, event.api, line)
        groups = self._families.setdefault(family, [])
        if event.ranks not in groups:
            groups.append(event.ranks)

    def feed_call(self, call: Collective) -> None:
        """Take note of what a group carries while models are sampled."""
        if call.signature.peer is None and call.step <= FIRST_STEPS:
            ranks = tuple(sorted(call.group.ranks))
            size = carried_bytes(call, frozenset(ranks))
            if size >= _LEAST_BYTES:
                self._carried[ranks] = self._carried.get(ranks, 0) + size
                if call.signature.op.startswith(_REDUCING):
                    self._reducing.add(ranks)

    def are_joined(self, ranks: Iterable[int]) -> bool:
        """Say whether reductions among these ranks alone connect all of them."""
        left = set(ranks)
        groups = [set(group) for group in self._reducing if left.issuperset(group)]
        joined = {left.pop()} if left else set()
        while near := [group for group in groups if group & joined and group - joined]:
            joined = joined.union(*near)
        return joined >= left

    def add(
        self,
        place: tuple[str, Moment, int],
        rank: int,
        held: Iterable[tuple[TensorPlan, Content]],
        site: CallSite,
    ) -> Iterator[ReplicaView]:
        """Take in what a rank holds of a model; yield what only some of the groups reduce."""
        model, moment, step = place
        if step >= FIRST_STEPS or moment not in (Moment.GRADIENT, Moment.STEP):
            return
        sample = self._samples.setdefault((moment, step), _Sample())
        trained = {plan.name: (plan, content) for plan, content in held if plan.requires_grad}
        sample.held.setdefault(rank, {})[model] = trained
        sample.sites[rank] = site
        if moment is Moment.STEP and step > 0 and trained:
            yield from self._views()

    def _views(self) -> Iterator[ReplicaView]:
        for groups in self._splits():
            reducing = [group for group in groups if self._reduces(group)]
            if not reducing:
                continue
            for group in groups:
                if group not in reducing:
                    yield from self._unsynced(group)

    def _splits(self) -> list[tuple[_Group, ...]]:
        """Return the ways in which the ranks were split into groups of the same size."""
        found = set()
        for family, groups in self._families.items():
            scope = family[2]
            assert isinstance(scope, tuple)
            if len(groups) == 1 and set(groups[0]) == set(scope):
                # One call made all parts: their sizes are those of the groups that were used.
                for size in {len(group) for group in self._carried}:
                    if 1 < size < len(scope) and len(scope) % size == 0:
                        starts = range(0, len(scope), size)
                        found.add(
                            tuple(_sorted(groups[0][start : start + size]) for start in starts)
                        )
                continue
            parts = tuple(_sorted(group) for group in groups)
            is_even = len({len(part) for part in parts}) == 1 and len(parts) > 1
            if is_even and sorted(rank for part in parts for rank in part) == sorted(scope):
                found.add(parts)
        return sorted(found)

    def _reduces(self, group: _Group) -> bool:
        """Say whether the gradients of these ranks' models are one and the same."""
        if self._carried.get(group, 0) == 0 or len(group) < 2:
            return False
        sample = self._samples.get((Moment.GRADIENT, 0))
        found = _shared(sample, group) if sample is not None else {}
        sizes = sum(c[group[0]].num_elements for names in found.values() for c in names.values())
        return sizes > 1 and all(
            len({content.digest for content in by_rank.values()}) == 1
            for names in found.values()
            for by_rank in names.values()
        )

    def _unsynced(self, group: _Group) -> Iterator[ReplicaView]:
        first, start = (self._samples.get((m, 0)) for m in (Moment.GRADIENT, Moment.STEP))
        later = [self._samples.get((Moment.STEP, step)) for step in range(1, FIRST_STEPS)]
        if first is None or start is None:
            return
        begun = _shared(start, group)
        drifted = [_shared(sample, group) for sample in later if sample is not None]
        for model, names in _shared(first, group).items():
            plans = {name: first.held[group[0]][model][name][0] for name in names}
            found = tuple(
                Disagreement(plans[name], by_rank)
                for name, by_rank in names.items()
                if plans[name].evidence is ReplicaEvidence.WORLD
                and differs(plans[name], by_rank)
                and len({c.digest for c in begun.get(model, {}).get(name, {}).values()}) == 1
                and any(differs(plans[name], d.get(model, {}).get(name, {})) for d in drifted)
            )
            if found and (model, group) not in self._shown:
                self._shown.add((model, group))
                yield ReplicaView(
                    model=model,
                    moment=Moment.GRADIENT,
                    step=0,
                    evidence=ReplicaEvidence.OTHER_GROUPS,
                    ranks=RankSet(group),
                    tensors=found,
                    num_compared=len(names),
                    alike_at=0,
                    sites={rank: first.sites[rank] for rank in group},
                )


def _sorted(group: _Group) -> _Group:
    return tuple(sorted(group))


def _shared(sample: _Sample, group: _Group) -> dict[str, dict[str, dict[int, Content]]]:
    """Return the contents by rank of each tensor of each model that all these ranks hold."""
    held = {rank: sample.held.get(rank, {}) for rank in group}
    models = set.intersection(*(set(each) for each in held.values()))
    return {
        model: {
            name: {rank: held[rank][model][name][1] for rank in group}
            for name in held[group[0]][model]
            if all(name in held[rank][model] for rank in group)
        }
        for model in sorted(models)
    }


def differs(
    plan: TensorPlan, by_rank: Mapping[int, Content], most_rounding: float = _ROUNDING
) -> bool:
    """Say whether ranks hold different values, rounding aside."""
    is_comparable = len({content.digest[:1] for content in by_rank.values()}) == 1
    is_other = len({content.digest for content in by_rank.values()}) > 1
    rounding = most_rounding if is_other else 0.0
    return is_comparable and is_other and Disagreement(plan, by_rank).difference > rounding


# Copies that are inferred, from the parameters of the same layer that ranks train together.
#
# A weight that several ranks train and that stays the same on all of them is one that they share.
# So is a bias by which a router of theirs chooses experts, and so is a router that is marked as a
# part of one rank's experts although the rest of its layer is shared.

_FEWEST: Final = 8
_ROUNDING_OF_UPDATES: Final = 1e-5
_MOVED: Final = 1e-4
"""What decays alone is multiplied by one factor, but for so much of its largest value."""


@dataclass(slots=True)
class _Newest:
    """What the ranks hold of a model in the last step of which they have reported."""

    step: int = -1
    held: dict[int, Held] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)


class InferredReplicas:
    """Compares biases and routers beside weights that ranks train together."""

    def __init__(self) -> None:
        self._starts: Recent[str, dict[int, Held]] = Recent(MOST_FOLLOWED)
        self._samples: Recent[str, _Newest] = Recent(MOST_FOLLOWED)
        self._shown: set[tuple[str, ReplicaEvidence, tuple[int, ...]]] = set()

    def add(
        self,
        place: tuple[str, Moment, int],
        rank: int,
        pairs: Iterable[tuple[TensorPlan, Content]],
        site: CallSite,
    ) -> Iterator[ReplicaView]:
        """Take in what a rank holds of a model at a moment; yield what should be the same."""
        model, moment, step = place
        if moment not in (Moment.START, Moment.STEP):
            return
        held = {plan.name: (plan, content) for plan, content in pairs if not plan.tied_to}
        start = self._starts.of(model, dict)
        if moment is Moment.START:
            start[rank] = held
            return
        newest = self._samples.of(model, _Newest)
        if step > newest.step:  # what ranks have reported of an earlier step is given up
            newest.step, newest.held = step, {}
        if step == newest.step:
            newest.held[rank] = held
            newest.sites[rank] = site
            yield from self._views(model, start, newest)

    def _views(
        self, model: str, start: Mapping[int, Held], newest: _Newest
    ) -> Iterator[ReplicaView]:
        step, now = newest.step, newest.held
        if now.keys() != start.keys():
            return
        for evidence, ranks, found in (*_biases(start, now), *_routers(start, now)):
            if found and (model, evidence, ranks) not in self._shown:
                self._shown.add((model, evidence, ranks))
                yield ReplicaView(
                    model=model,
                    moment=Moment.STEP,
                    step=step,
                    evidence=evidence,
                    ranks=RankSet(ranks),
                    tensors=found,
                    num_compared=len(found),
                    alike_at=0,
                    sites={rank: newest.sites[rank] for rank in ranks},
                )


_Found = tuple[ReplicaEvidence, tuple[int, ...], tuple[Disagreement, ...]]


def _biases(start: Mapping[int, Held], now: Mapping[int, Held]) -> Iterator[_Found]:
    """Yield biases of routers, for each set of ranks that train their routers together."""
    found: dict[tuple[int, ...], list[Disagreement]] = {}
    names = {n for held in now.values() for n, (plan, _) in held.items() if _is_inferred(plan)}
    for name in sorted(names):
        ranks = [rank for rank, held in now.items() if name in held]
        for group in _groups_of(name, start, {rank: now[rank] for rank in ranks}):
            begun, copies = _of(name, start, group), _of(name, now, group)
            if len(begun) == len(copies) and are_equal(begun):
                plan = copies[group[0]][0]
                by_rank = {rank: content for rank, (_, content) in copies.items()}
                if differs(plan, by_rank, _ROUNDING_OF_UPDATES):
                    found.setdefault(group, []).append(Disagreement(plan, by_rank))
    for group, tensors in found.items():
        yield ReplicaEvidence.ROUTER, group, tuple(tensors)


def _is_inferred(plan: TensorPlan) -> bool:
    return plan.is_routing_bias and plan.evidence is ReplicaEvidence.WORLD


def _groups_of(
    name: str, start: Mapping[int, Held], now: Mapping[int, Held]
) -> Iterator[tuple[int, ...]]:
    """Yield the sets of ranks that train the router of a bias together."""
    groups: dict[str, list[int]] = {}
    for rank, held in now.items():
        router = _router_of(held[name][0], held)
        if router is not None and _has_moved(start[rank].get(router), held[router]):
            groups.setdefault(held[router][1].digest, []).append(rank)
    yield from (tuple(sorted(group)) for group in groups.values() if len(group) > 1)


def _router_of(bias: TensorPlan, held: Held) -> str | None:
    module = bias.name.rpartition(".")[0]
    for name, (plan, _) in held.items():
        is_near = name.startswith(f"{module}." if module else "")
        is_router = plan.requires_grad and len(plan.shape) > 1 and bias.shape[-1] in plan.shape
        if is_near and is_router and not is_of_expert(plan):
            return name
    return None


def _routers(start: Mapping[int, Held], now: Mapping[int, Held]) -> Iterator[_Found]:
    """Yield routers marked as own parts in layers whose rest all ranks train together."""
    ranks = tuple(sorted(now))
    own = {n: p for n, (p, _) in now[ranks[0]].items() if p.evidence is ReplicaEvidence.OWN}
    routers = _spreading(now)
    dense = {name for name, plan in own.items() if not is_of_expert(plan)}
    if not dense or dense - routers or len(ranks) < 2:
        return  # who trains other parts for itself may mean the routers, too
    begun = {name: _of(name, start, ranks) for name in _shared_by_all(now)}
    shared = [name for name, each in begun.items() if len(each) == len(ranks)]
    if any(not are_equal(_of(name, now, ranks)) for name in shared if name not in dense):
        return
    moved = [n for n in shared if all(_has_moved(start[r].get(n), now[r][n]) for r in ranks)]
    found = [
        Disagreement(own[name], {rank: now[rank][name][1] for rank in ranks})
        for name in sorted(dense)
        if name in shared and are_equal(begun[name]) and not _is_constant(begun[name])
        if any(n.startswith(_block_of(name)) for n in moved if n not in dense)
    ]
    yield (
        ReplicaEvidence.LAYER,
        ranks,
        tuple(d for d in found if differs(d.plan, d.by_rank, _ROUNDING_OF_UPDATES)),
    )


def _spreading(now: Mapping[int, Held]) -> frozenset[str]:
    """Return the routers that know experts of other ranks, on all ranks."""
    plans = [[plan for plan, _ in held.values()] for held in now.values()]
    return frozenset.intersection(*(spreading_routers(each) for each in plans))


def _shared_by_all(now: Mapping[int, Held]) -> Iterator[str]:
    """Yield the trained parameters that are parts of no rank, but for routers marked so."""
    held = next(iter(now.values()))
    for name, (plan, _) in held.items():
        is_kept = bool(plan.replicas) or plan.evidence is ReplicaEvidence.OWN
        is_dense = plan.requires_grad and is_kept and not is_of_expert(plan)
        if is_dense and all(name in each for each in now.values()):
            yield name


def _block_of(router: str) -> str:
    """Return the beginning of the names in the block that the layer of a router stands in."""
    block = layer_of(router).rpartition(".")[0]
    return f"{block}." if block else ""


def _of(name: str, held: Mapping[int, Held], ranks: tuple[int, ...]) -> Copies:
    return {rank: held[rank][name] for rank in ranks if name in held[rank]}


def _is_constant(copies: Copies) -> bool:
    return any(content.least == content.greatest for _, content in copies.values())


def _has_moved(
    before: tuple[TensorPlan, Content] | None, after: tuple[TensorPlan, Content]
) -> bool:
    """Say whether training has changed a weight otherwise than by one factor."""
    if before is None or after[1].num_elements < _FEWEST:
        return False
    early, late = before[1], after[1]
    peaks = [max(abs(c.least), abs(c.greatest)) for c in (early, late)]
    if not all(0 < peak < float("inf") for peak in peaks) or early.digest == late.digest:
        return False
    factor = peaks[1] / peaks[0]
    figures = [(c.least, c.greatest, c.mean) for c in (early, late)]
    return any(abs(b - factor * a) > _MOVED * peaks[1] for a, b in zip(*figures, strict=True))


# Finds copies between whose ranks nothing passes that would make them equal again.

FEWEST_STEPS: Final = 4
"""A run that is over after fewer steps tells nothing."""

PATIENCE: Final = {ReplicaEvidence.UNSYNCED: 2000, ReplicaEvidence.OTHER_GROUPS: 100}
"""After so many steps without a word between them the ranks are judged while they train."""

_SMALL: Final = 32
"""Less than this part of the tensors, in one step, is no average or change of them."""


@dataclass(slots=True)
class _Pending:
    """Ranks whose gradients differed in one of their first steps."""

    view: ReplicaView
    ranks: frozenset[int]
    has_drifted: bool
    is_judged: bool = False

    @property
    def num_bytes(self) -> int:
        """How large the tensors are that differ."""
        return sum(
            next(iter(tensor.by_rank.values())).num_elements * element_bytes(tensor.plan.dtype)
            for tensor in self.view.tensors
        )


class UnsyncedReplicas:
    """Finds copies between whose ranks nothing has passed, after many steps or at the end."""

    needs = (Collective, EventsLost, Finished, GroupCreated, ProbeDisabled, StepEnd)

    def __init__(self) -> None:
        self.parallel = ParallelGroups()
        self._traffic = Traffic()
        self._pending: dict[tuple[str, ReplicaEvidence, frozenset[int]], _Pending] = {}
        self._steps: dict[int, int] = {}
        self._finished: set[int] = set()
        self._is_blind = False

    def feed(self, event: Event) -> Iterator[ReplicaView]:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self.parallel.feed_call(event)
                self._traffic.add(event)
            case StepEnd():
                self._steps[event.rank] = event.step + 1
                yield from self._views(is_over=False)
            case GroupCreated():
                self.parallel.feed_group(event)
            case Finished(exit_status=0):
                self._finished.add(event.rank)
            case ProbeDisabled() if event.probe in RECORDS_OF_CALLS:
                self._is_blind = True
            case EventsLost():
                self._is_blind = True

    def note(self, view: ReplicaView) -> None:
        """Take note of copies that differ, if they were the same and nothing tells why."""
        if view.evidence not in PATIENCE or view.alike_at is None:
            return
        key = (view.model, view.evidence, frozenset(view.ranks))
        known = self._pending.get(key)
        if view.moment is Moment.STEP and known is not None:
            known.has_drifted = True
        elif view.moment is Moment.GRADIENT and known is None and view.step < FIRST_STEPS:
            has_drifted = view.evidence is ReplicaEvidence.OTHER_GROUPS
            self._pending[key] = _Pending(view, frozenset(view.ranks), has_drifted)

    def end(self) -> Iterator[ReplicaView]:
        """Yield, at the end, what ran to its end."""
        yield from self._views(is_over=True)

    def _views(self, *, is_over: bool) -> Iterator[ReplicaView]:
        if self._is_blind:
            return
        for pending in self._pending.values():
            if pending.is_judged or not pending.has_drifted:
                continue
            num_steps = min(self._steps.get(rank, 0) for rank in pending.ranks)
            is_late = num_steps >= PATIENCE[pending.view.evidence]
            is_whole = is_over and pending.ranks <= self._finished and num_steps >= FEWEST_STEPS
            if not (is_late or is_whole):
                continue
            pending.is_judged = True
            if not self._have_met(pending):
                yield replace(pending.view, num_unsynced_steps=num_steps)

    def _have_met(self, pending: _Pending) -> bool:
        most, total = self._traffic.between(pending.ranks)
        return most * _SMALL >= pending.num_bytes or total >= pending.num_bytes
