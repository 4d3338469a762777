"""Ranks whose gradients stay their own while the groups beside theirs reduce them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from distdiag.engine.traffic import carried_bytes
from distdiag.event import CallSite, Collective, GroupCreated
from distdiag.model_event import Basis, Content, Moment, TensorPlan
from distdiag.model_view import Disagreement, ReplicaView
from distdiag.ranks import RankSet

FIRST_STEPS: Final = 3
_ROUNDING: Final = 1e-3
_LEAST_BYTES: Final = 256
_REDUCING: Final = ("all_reduce", "reduce_scatter")

Held = Mapping[str, tuple[TensorPlan, Content]]
_Group = tuple[int, ...]
_Family = tuple[object, ...]


@dataclass(slots=True)
class _Look:
    """What the ranks held at one moment of one step: trainable parameters of each model."""

    held: dict[int, dict[str, Held]] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)


class Siblings:
    """Finds groups that were made by the same split, some of which reduce gradients.

    A stage of a pipeline that reduces its gradients over its data-parallel group tells that the
    other stages should do the same over theirs.
    """

    def __init__(self) -> None:
        """Know of no group yet."""
        self._families: dict[_Family, list[_Group]] = {}
        self._carried: dict[_Group, int] = {}
        self._reducing: set[_Group] = set()
        self._looks: dict[tuple[Moment, int], _Look] = {}
        self._shown: set[tuple[str, _Group]] = set()

    def feed_group(self, event: GroupCreated) -> None:
        """Take note of a group that is made; those made by one line in one way are a family."""
        if event.done or event.api in ("init_process_group", "destroy_process_group"):
            return
        where = event.site.location
        line = (where.file, where.line) if where is not None else None
        family = (event.rank, event.generation, event.scope, event.desc, event.api, line)
        groups = self._families.setdefault(family, [])
        if event.ranks not in groups:
            groups.append(event.ranks)

    def feed_call(self, call: Collective) -> None:
        """Take note of what a group carries while models are looked at."""
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
        look = self._looks.setdefault((moment, step), _Look())
        trained = {plan.name: (plan, content) for plan, content in held if plan.requires_grad}
        look.held.setdefault(rank, {})[model] = trained
        look.sites[rank] = site
        if moment is Moment.STEP and step > 0 and trained:
            yield from self._views()

    def _views(self) -> Iterator[ReplicaView]:
        for groups in self._splits():
            reducing = [group for group in groups if self._reduces(group)]
            if not reducing:
                continue
            for group in groups:
                if group not in reducing:
                    yield from self._apart(group)

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
        look = self._looks.get((Moment.GRADIENT, 0))
        found = _shared(look, group) if look is not None else {}
        sizes = sum(c[group[0]].num_elements for names in found.values() for c in names.values())
        return sizes > 1 and all(
            len({content.digest for content in by_rank.values()}) == 1
            for names in found.values()
            for by_rank in names.values()
        )

    def _apart(self, group: _Group) -> Iterator[ReplicaView]:
        first, start = (self._looks.get((m, 0)) for m in (Moment.GRADIENT, Moment.STEP))
        later = [self._looks.get((Moment.STEP, step)) for step in range(1, FIRST_STEPS)]
        if first is None or start is None:
            return
        begun = _shared(start, group)
        drifted = [_shared(look, group) for look in later if look is not None]
        for model, names in _shared(first, group).items():
            plans = {name: first.held[group[0]][model][name][0] for name in names}
            found = tuple(
                Disagreement(plans[name], by_rank)
                for name, by_rank in names.items()
                if plans[name].basis is Basis.WORLD
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
                    basis=Basis.SIBLING,
                    ranks=RankSet(group),
                    tensors=found,
                    num_compared=len(names),
                    alike_at=0,
                    sites={rank: first.sites[rank] for rank in group},
                )


def _sorted(group: _Group) -> _Group:
    return tuple(sorted(group))


def _shared(look: _Look, group: _Group) -> dict[str, dict[str, dict[int, Content]]]:
    """Return the contents by rank of each tensor of each model that all these ranks hold."""
    held = {rank: look.held.get(rank, {}) for rank in group}
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
