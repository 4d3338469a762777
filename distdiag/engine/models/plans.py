"""Sharding plans put beside what is there: the user's table, and the plans of programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distdiag.config.placement_rules import PlacementRule
from distdiag.events.models import NamedFault, PatternMatches, PlanPatterns, PlanSource, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.views.models import PatternView, PlanView, ProgramPlanView, RuledTensor, RuleView

Plans = Mapping[int, Mapping[str, tuple[TensorPlan, ...]]]
"""The plans of all tensors, by rank and model."""


@dataclass(slots=True)
class _Pattern:
    """What became of one pattern at one place, on all ranks."""

    seen: PatternMatches
    num_matches: int = 0
    ranks: set[int] = field(default_factory=set)
    faults: dict[NamedFault, set[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Place:
    first: PlanPatterns
    ranks: set[int] = field(default_factory=set)
    patterns: dict[tuple[str, str], _Pattern] = field(default_factory=dict)


class UserPlans:
    """Collects plans; what a pattern matches is only known when all ranks have reported."""

    def __init__(self, world: RankSet, rules: Sequence[PlacementRule]) -> None:
        self._world = world
        self._rules = tuple(rules)
        self._places: dict[tuple[object, ...], _Place] = {}
        self._stepped: set[int] = set()

    def add(self, event: PlanPatterns) -> None:
        """Take in a plan that a program applied; the same line may apply it to many modules."""
        key = (event.source, event.site.location or event.model)
        place = self._places.setdefault(key, _Place(event))
        place.ranks.add(event.rank)
        for seen in event.patterns:
            pattern = place.patterns.setdefault((seen.pattern, seen.wanted), _Pattern(seen))
            pattern.num_matches += seen.num_matches
            pattern.ranks.add(event.rank)
            for fault in seen.faults:
                pattern.faults.setdefault(fault, set()).add(event.rank)

    def has_stepped(self, rank: int) -> bool:
        """Take note of a rank that trains; return whether it was the last to begin."""
        if rank in self._stepped:
            return False
        self._stepped.add(rank)
        return self._stepped >= set(self._world)

    def views(self, plans: Plans) -> Iterator[PlanView]:
        """Yield what is known of each plan now."""
        for place in self._places.values():
            yield ProgramPlanView(
                place.first.source,
                place.first.model,
                tuple(_view_of(pattern) for pattern in place.patterns.values()),
                RankSet(place.ranks),
                place.first.site,
            )
        if self._rules and any(plans.values()):
            yield self._ruled(plans)

    def _ruled(self, plans: Plans) -> RuleView:
        tensors: dict[tuple[object, ...], tuple[str, TensorPlan, list[int]]] = {}
        axes: dict[str, set[str]] = {}
        for rank, models in sorted(plans.items()):
            for model, held in models.items():
                for plan in held:
                    mesh = (plan.mesh.names, plan.mesh.sizes) if plan.mesh else ()
                    key = (model, plan.name, plan.shape, plan.placements, mesh, plan.evidence)
                    tensors.setdefault(key, (model, plan, []))[2].append(rank)
                    axes.setdefault(model, set()).update(mesh[0] if mesh else ())
        return RuleView(
            self._rules,
            tuple(RuledTensor(model, plan, RankSet(r)) for model, plan, r in tensors.values()),
            self._world,
            tuple(dict.fromkeys(self._applied())),
            {model: frozenset(names) for model, names in axes.items()},
        )

    def _applied(self) -> Iterator[tuple[str, str]]:
        for place in self._places.values():
            if place.first.source is PlanSource.VEOMNI:
                for pattern, wanted in place.patterns:
                    yield pattern, wanted.rpartition(" over ")[2]


def _view_of(pattern: _Pattern) -> PatternView:
    faults = {fault: RankSet(ranks) for fault, ranks in pattern.faults.items()}
    return PatternView(pattern.seen, pattern.num_matches, RankSet(pattern.ranks), faults)
