"""Views of models over ranks: plans, contents and gradients side by side."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from distdiag.config.placement_rules import PlacementRule
from distdiag.events.base import CallSite
from distdiag.events.models import (
    Content,
    Moment,
    NamedFault,
    ObjectKind,
    PatternMatches,
    PlanSource,
    ReplicaEvidence,
    TensorPlan,
)
from distdiag.events.ranks import RankSet
from distdiag.views.base import Thing, View, things_in

# Views of sharding plans over ranks: the user's own table, and the plans of programs.


@dataclass(frozen=True, slots=True)
class RuledTensor:
    """A tensor of a model as these ranks keep it."""

    model: str
    plan: TensorPlan
    ranks: RankSet


@dataclass(frozen=True, slots=True)
class RuleView(View):
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

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return "rules"


@dataclass(frozen=True, slots=True)
class PatternView:
    """One pattern of a program's plan, over all ranks and all times it was applied at one place."""

    seen: PatternMatches
    num_matches: int
    ranks: RankSet
    faults: Mapping[NamedFault, RankSet] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramPlanView(View):
    """A plan that a program applied at one place."""

    source: PlanSource
    model: str
    patterns: tuple[PatternView, ...]
    ranks: RankSet
    site: CallSite

    @property
    def things(self) -> tuple[Thing, ...]:
        """Nothing: the model may be a part of one, and is only known by its class."""
        return ()

    @property
    def is_users_own(self) -> bool:
        """Whether the user's code wrote the plan, as far as the place tells."""
        return bool(self.site.frames) and self.site.frames[0].user

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.source, self.model, self.site


PlanView = RuleView | ProgramPlanView


# Plans, contents and gradients of models, side by side.


@dataclass(frozen=True, slots=True)
class ModelView(View):
    """The plans of one model on all ranks that keep it together, as seen at `step`."""

    model: str
    moment: Moment
    step: int
    by_rank: Mapping[int, tuple[TensorPlan, ...]]
    sites: Mapping[int, CallSite] = field(default_factory=dict)

    @property
    def ranks(self) -> RankSet:
        """All ranks that have a plan."""
        return RankSet(self.by_rank)

    @property
    def things(self) -> tuple[Thing, ...]:
        """The model, and the meshes that its tensors lie on."""
        plans = (plan for held in self.by_rank.values() for plan in held)
        meshes = dict.fromkeys(str(plan.mesh) for plan in plans if plan.mesh is not None)
        return (*things_in(self), *(Thing(ObjectKind.MESH, name) for name in meshes))


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A tensor that is not the same on all ranks that should hold the same."""

    plan: TensorPlan
    by_rank: Mapping[int, Content]

    @property
    def difference(self) -> float:
        """By how much the values differ at most, relative to the largest one."""
        contents = list(self.by_rank.values())
        if len({content.nan_share for content in contents}) > 1:
            return math.inf
        peak = max((abs(v) for c in contents for v in (c.least, c.greatest)), default=0.0)
        if not math.isfinite(peak) or peak == 0.0:
            return math.inf
        figures = ("least", "greatest", "mean")
        values = [[getattr(content, figure) for content in contents] for figure in figures]
        if any(math.isnan(value) for each in values for value in each):
            return math.inf
        return float(max(max(each) - min(each) for each in values) / peak)

    @property
    def groups(self) -> tuple[RankSet, ...]:
        """The ranks that hold the same, the largest group first."""
        groups: dict[str, list[int]] = {}
        for rank in sorted(self.by_rank):
            groups.setdefault(self.by_rank[rank].digest, []).append(rank)
        return tuple(RankSet(group) for group in sorted(groups.values(), key=len, reverse=True))


@dataclass(frozen=True, slots=True)
class ReplicaView(View):
    """Tensors of a model that differ between the ranks that should hold the same.

    `alike_at` is the last step at which all of these tensors were seen to be the same, None if that
    was never seen. `num_compared` tensors were compared. For `num_unsynced_steps` steps nothing of
    the size of these tensors has passed between the ranks; 0: something has, or it is not known.
    """

    model: str
    moment: Moment
    step: int
    evidence: ReplicaEvidence
    ranks: RankSet
    tensors: tuple[Disagreement, ...]
    num_compared: int
    alike_at: int | None = None
    sites: Mapping[int, CallSite] = field(default_factory=dict)
    num_unsynced_steps: int = 0


class StartReplicas(ReplicaView):
    """Parameters and buffers when the model is used for the first time."""

    __slots__ = ()


class GradientReplicas(ReplicaView):
    """Gradients when an optimizer is about to apply them."""

    __slots__ = ()


class StepReplicas(ReplicaView):
    """Parameters and buffers after a step."""

    __slots__ = ()


class EvaluationReplicas(ReplicaView):
    """Statistics by which layers normalise, as an evaluation has used them."""

    __slots__ = ()


class RouterBiasReplicas(StepReplicas):
    """The same of models that have a bias by which experts are chosen."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ContentView(View):
    """What each rank's part of a model holds when it is used for the first time."""

    model: str
    step: int
    by_rank: Mapping[int, tuple[tuple[TensorPlan, Content], ...]]
    sites: Mapping[int, CallSite] = field(default_factory=dict)


class LaterContents(ContentView):
    """The same before a later step, of models with tensors that are each rank's own."""

    __slots__ = ()


class ExpertContents(ContentView):
    """The same of models that have experts."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ScalingView(View):
    """By what each rank multiplied its gradients between the backward pass and the step.

    `num_elements` is how many numbers these gradients have.
    """

    model: str
    step: int
    by_rank: Mapping[int, float]
    sites: Mapping[int, CallSite] = field(default_factory=dict)
    num_elements: int = 0


@dataclass(frozen=True, slots=True)
class UntrainedView(View):
    """What an optimizer holds and had no gradient for at any of `num_samples` samples.

    `parted` are parameters that never had one on some ranks, and always on these others that hold
    copies of them.
    """

    optimizer: str
    never: Mapping[int, tuple[str, ...]]
    parted: Mapping[str, RankSet]
    num_samples: int
    sites: Mapping[int, CallSite] = field(default_factory=dict)


ModelViews = ModelView | ReplicaView | ContentView | ScalingView | UntrainedView
