"""Whether tensors are placed as the rules of a plan say, and how sure that is."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from distdiag.config.placement_rules import ALL_AXES, AxisPlacement, PlacementRule, matches
from distdiag.events.models import (
    NamedFault,
    PatternMatches,
    PlanFault,
    ReplicaEvidence,
    TensorPlan,
)
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Grade, Location
from distdiag.views.models import ProgramPlanView, RuledTensor, RuleView


class SeenFault(NamedTuple):
    """A fault of one tensor or module, with the pattern that matched it."""

    pattern: PatternMatches
    fault: NamedFault
    ranks: RankSet

    def as_evidence(self, location: Location | None) -> Evidence:
        """Return the fault as a line of evidence."""
        summary = f'{self.fault.name}: "{self.pattern.pattern}" says {self.pattern.wanted}, '
        return Evidence(ranks=self.ranks, summary=summary + self.fault.text, location=location)


def faults_of(view: ProgramPlanView, kind: PlanFault) -> list[SeenFault]:
    """Return the faults of one kind in the order of the plan."""
    return [
        SeenFault(each.seen, fault, ranks)
        for each in view.patterns
        for fault, ranks in each.faults.items()
        if fault.fault is kind
    ]


_SHARD: Final = re.compile(r"_?S\((-?\d+)")
_EXPERT_AXES: Final = ("ep", "expert", "expert_parallel", "moe_ep")
_TENSOR_AXES: Final = ("tp", "tensor", "tensor_parallel")
_UNNAMED: Final = re.compile(r"dim\d+")


class Contradiction(NamedTuple):
    """A tensor that is not placed as a rule says."""

    tensor: RuledTensor
    rule: PlacementRule
    actual: str
    grade: Grade


class Clash(NamedTuple):
    """A tensor for which two rules want different placements over one axis."""

    tensor: RuledTensor
    rules: tuple[PlacementRule, PlacementRule]
    axis: str


class Uneven(NamedTuple):
    """A tensor whose dimension the size of an axis does not divide."""

    tensor: RuledTensor
    rule: PlacementRule
    text: str
    is_expert: bool


def ruled(view: RuleView) -> Iterator[tuple[RuledTensor, tuple[PlacementRule, ...]]]:
    """Yield the parameters for which there are rules."""
    by_name: dict[str, tuple[PlacementRule, ...]] = {}
    for tensor in view.tensors:
        name = tensor.plan.name
        if name not in by_name:
            by_name[name] = tuple(rule for rule in view.rules if matches(rule.pattern, name))
        if by_name[name] and tensor.plan.is_parameter:
            yield tensor, by_name[name]


def clashes(view: RuleView) -> Iterator[Clash]:
    """Yield the parameters whose rules do not agree, each once."""
    for tensor, rules in ruled(view):
        found = clash_of(tensor.plan, rules)
        if found is not None:
            yield Clash(tensor, *found)


def clash_of(
    plan: TensorPlan, rules: tuple[PlacementRule, ...]
) -> tuple[tuple[PlacementRule, PlacementRule], str] | None:
    """Return the first two rules that do not agree about a tensor, and the axis."""
    for index, rule in enumerate(rules):
        for other in rules[index + 1 :]:
            axis = rule.clashing_axis(other, len(plan.shape))
            if axis is not None:
                return (rule, other), axis
    return None


def contradictions(view: RuleView) -> Iterator[Contradiction]:
    """Yield the parameters that are not placed as their rules say."""
    for tensor, rules in ruled(view):
        if clash_of(tensor.plan, rules) is not None:
            continue  # nobody knows what is wanted
        for rule in rules:
            grade = _grade(tensor, rule, view)
            if grade is not None:
                yield Contradiction(tensor, rule, layout(tensor.plan), grade)
                break


def uneven(view: RuleView) -> Iterator[Uneven]:
    """Yield the parameters that cannot be split evenly over axes that ask for it."""
    for tensor, rules in ruled(view):
        mesh = tensor.plan.mesh
        sizes = dict(zip(mesh.names, mesh.sizes, strict=True)) if mesh else {}
        for rule in rules:
            for placed in rule.placements:
                is_expert = placed.axis in _EXPERT_AXES
                dim, size = placed.dim, sizes.get(placed.axis, 1)
                if dim is None or not (is_expert or placed.axis in _TENSOR_AXES):
                    continue
                length = _length(tensor.plan.shape, dim)
                if length % size:
                    text = f"{length} is no multiple of {placed.axis}={size}"
                    yield Uneven(tensor, rule, text, is_expert)


def layout(plan: TensorPlan) -> str:
    """Say how a tensor lies: ``S(0) over dp_shard, R over tp``."""
    if plan.mesh is None:
        return "a plain tensor, no DTensor"
    pairs = zip(plan.placements, plan.mesh.names, strict=False)
    return ", ".join(f"{placement} over {axis}" for placement, axis in pairs)


def _grade(tensor: RuledTensor, rule: PlacementRule, view: RuleView) -> Grade | None:
    """Say how sure it is that a tensor contradicts a rule, None if it does not."""
    grades = [_grade_over(tensor, rule, placed, view) for placed in rule.placements]
    found = [grade for grade in grades if grade is not None]
    return min(found, key=list(Grade).index, default=None)


def _grade_over(
    tensor: RuledTensor, rule: PlacementRule, placed: AxisPlacement, view: RuleView
) -> Grade | None:
    plan = tensor.plan
    symbols = (
        dict(zip(plan.mesh.names, map(_symbol, plan.placements), strict=False)) if plan.mesh else {}
    )
    if placed.axis == ALL_AXES:
        wanted = {axis: rule.wanted(axis, len(plan.shape)) for axis in symbols}
        return Grade.PROVEN if any(symbols[a] != wanted[a] for a in symbols) else None
    if placed.axis in symbols:
        is_met = symbols[placed.axis] == placed.symbol(len(plan.shape))
        return None if is_met else Grade.PROVEN
    if placed.dim is None or len(view.world) == 1:
        return None
    if any(axis == placed.axis and matches(text, plan.name) for text, axis in view.applied):
        return None
    if plan.mesh is None:
        return _grade_of_plain(tensor, placed.axis, view)
    if all(_UNNAMED.fullmatch(axis) for axis in symbols):
        return None if placed.symbol(len(plan.shape)) in symbols.values() else Grade.LIKELY
    parts = set(placed.axis.split("_"))
    is_renamed = any(parts <= set(axis.split("_")) for axis in symbols)
    if is_renamed or not set(plan.mesh.ranks) >= set(view.world):
        return Grade.NOTE  # it may be split beyond what the DTensor says
    return Grade.PROVEN


def _grade_of_plain(tensor: RuledTensor, axis: str, view: RuleView) -> Grade | None:
    """Judge a plain tensor that should be split: each rank may hold a part on purpose."""
    plan = tensor.plan
    if not plan.replicas:
        return None  # a part, or flattened into one
    if axis in view.axes.get(tensor.model, frozenset()):
        return Grade.LIKELY  # others of the same model are DTensors on that axis
    is_whole = plan.evidence in (
        ReplicaEvidence.WRAPPER,
        ReplicaEvidence.REDUCED,
        ReplicaEvidence.MESH,
    )
    return Grade.LIKELY if is_whole and set(plan.replicas) >= set(view.world) else Grade.NOTE


def _length(shape: tuple[int, ...], dim: int) -> int:
    return shape[dim] if -len(shape) <= dim < len(shape) else 0


def _symbol(placement: str) -> str:
    """Return a placement as rules have it: a strided shard is a shard."""
    found = _SHARD.match(placement)
    return f"S({found[1]})" if found else placement
