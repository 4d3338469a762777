"""Views of sharding plans over ranks: the user's own table, and the plans of programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distdiag.event import CallSite
from distdiag.model_event import TensorPlan
from distdiag.placement_rule import PlacementRule
from distdiag.plan_event import NamedFault, PatternMatches, PlanSource
from distdiag.ranks import RankSet


@dataclass(frozen=True, slots=True)
class RuledTensor:
    """A tensor of a model as these ranks keep it."""

    model: str
    plan: TensorPlan
    ranks: RankSet


@dataclass(frozen=True, slots=True)
class RuleView:
    """The user's rules, and all tensors of all models.

    `applied` are patterns by which the program itself splits tensors over an axis, with the axis:
    frameworks that keep plain parts do not show it in the placement of a tensor. `axes` are those
    of the meshes of each model.
    """

    rules: tuple[PlacementRule, ...]
    tensors: tuple[RuledTensor, ...]
    world: RankSet
    applied: tuple[tuple[str, str], ...] = ()
    axes: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PatternView:
    """One pattern of a program's plan, over all ranks and all times it was applied at one place."""

    seen: PatternMatches
    num_matches: int
    ranks: RankSet
    faults: Mapping[NamedFault, RankSet] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramPlanView:
    """A plan that a program applied at one place."""

    source: PlanSource
    model: str
    patterns: tuple[PatternView, ...]
    ranks: RankSet
    site: CallSite

    @property
    def is_users_own(self) -> bool:
        """Whether the user's code wrote the plan, as far as the place tells."""
        return bool(self.site.frames) and self.site.frames[0].user


PlanView = RuleView | ProgramPlanView
