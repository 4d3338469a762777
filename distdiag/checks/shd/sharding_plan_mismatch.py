"""SHD002: ranks shard one model differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import location_on
from distdiag.events.models import Basis, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ModelView

# How plans of a model differ between ranks, and how that reads.


class Difference(NamedTuple):
    """The first aspect of a tensor in which ranks differ; `values` are ranks by what they have.

    Not `is_told`: nothing tells that ranks should hold the same tensor, or parts of one.
    """

    name: str
    aspect: str
    values: Mapping[str, RankSet]
    is_told: bool = True


def first_difference(view: ModelView) -> Difference | None:
    """Return the first tensor, in the order of the model, that ranks keep differently.

    One that ranks should keep alike, by what is known of it, comes before one that each may have
    for itself.
    """
    tables = {rank: {plan.name: plan for plan in plans} for rank, plans in view.by_rank.items()}
    names = dict.fromkeys(plan.name for plans in view.by_rank.values() for plan in plans)
    untold: Difference | None = None
    for name in names:
        plans = {rank: table.get(name) for rank, table in tables.items()}
        difference = _difference(name, plans)
        if difference is None:
            continue
        if any(_is_told(plan) for plan in plans.values() if plan is not None):
            return difference
        untold = untold or difference._replace(is_told=False)
    return untold


def _is_told(plan: TensorPlan) -> bool:
    if plan.is_ignored and plan.basis is Basis.WRAPPER:
        return False
    return bool(plan.keeper or plan.mesh or plan.placements) or plan.basis is not Basis.WORLD


def _difference(name: str, plans: Mapping[int, TensorPlan | None]) -> Difference | None:
    if None in plans.values():
        if all(plan is None or _is_own(plan) for plan in plans.values()):
            return None
        return _by_value(name, "presence", {r: _presence(plan) for r, plan in plans.items()})
    there = {rank: plan for rank, plan in plans.items() if plan is not None}
    for aspect, values in _aspects(there):
        found = _by_value(name, aspect, values)
        if found is not None:
            return found
    return _mesh_order(name, there)


def _is_own(plan: TensorPlan) -> bool:
    """Say whether it was declared to be one rank's own, such as an expert under a global name."""
    return plan.is_ignored or plan.basis is Basis.OWN


def _presence(plan: TensorPlan | None) -> str:
    return "missing" if plan is None else "there"


def _aspects(plans: Mapping[int, TensorPlan]) -> Iterator[tuple[str, Mapping[int, str]]]:
    yield "global shape", {r: str(list(p.shape)) for r, p in plans.items()}
    yield "dtype", {r: p.dtype for r, p in plans.items()}
    yield "placement", {r: ", ".join(p.placements) or "not sharded" for r, p in plans.items()}
    yield "mesh", {r: str(p.mesh) for r, p in plans.items()}
    yield "wrapper", {r: p.keeper or "none" for r, p in plans.items()}
    yield "wrapped unit", {r: p.unit or "the root" for r, p in plans.items()}
    yield (
        "param_dtype",
        {r: p.policy.param_dtype or "that of the parameter" for r, p in plans.items()},
    )
    yield (
        "reduce_dtype",
        {r: p.policy.reduce_dtype or "that of the gradient" for r, p in plans.items()},
    )
    yield "offload", {r: p.policy.offload or "none" for r, p in plans.items()}
    yield (
        "reshard_after_forward",
        {r: p.policy.reshard_after_forward or "none" for r, p in plans.items()},
    )
    yield "requires_grad", {r: str(p.requires_grad) for r, p in plans.items()}
    yield "tie", {r: p.tied_to or "not tied" for r, p in plans.items()}


def _by_value(name: str, aspect: str, values: Mapping[int, str]) -> Difference | None:
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return None
    return Difference(name, aspect, {value: RankSet(those) for value, those in ranks.items()})


def _mesh_order(name: str, plans: Mapping[int, TensorPlan]) -> Difference | None:
    """Find ranks that lay the same ranks out differently on a mesh."""
    by_members: dict[frozenset[int], dict[int, str]] = {}
    for rank, plan in plans.items():
        if plan.mesh is not None:
            members = frozenset(plan.mesh.ranks)
            by_members.setdefault(members, {})[rank] = str(list(plan.mesh.ranks))
    for values in by_members.values():
        found = _by_value(name, "order of ranks on the mesh", values)
        if found is not None:
            return found
    return None


def odd_ranks(difference: Difference) -> tuple[RankSet, bool]:
    """Return the ranks that stand against a majority, all if there is none, and which it is."""
    camps = sorted(difference.values.values(), key=len, reverse=True)
    if len(camps[0]) > len(camps[1]):
        return RankSet(rank for camp in camps[1:] for rank in camp), True
    return RankSet(rank for camp in camps for rank in camp), False


# ---


class ShardingPlanMismatch(Check[ModelView]):
    """Ranks shard or wrap one model differently.

    ## What it detects
    The first tensor of a model whose global shape, dtype, placement, mesh, wrapper, unit, mixed
    precision, offloading, `reshard_after_forward`, `requires_grad` or tie is not the same on all
    ranks that keep the model together. A note where nothing tells that ranks should keep that
    tensor alike, such as parts of a model that each rank has for itself.

    ## Why it matters
    Ranks gather and reduce by their own plan. Where the plans differ they exchange tensors of
    different sizes, which aborts or hangs, or tensors of equal size that mean different things,
    which trains on a patchwork.

    ## Example
    A wrapping rule that looks at a rank's own data or environment; a layer that is frozen on rank 0
    only; a mesh whose axes are in another order on one node.

    ## How to fix
    Derive the plan from the configuration and the model alone, so that it is the same everywhere.

    ## References
    - `torch.distributed.fsdp.fully_shard`, `torch.distributed.tensor.parallel.parallelize_module`
    """

    code = "SHD002"
    name = "sharding-plan-mismatch"
    severity = Severity.ERROR

    why = "No backend compares plans: each rank sends and expects what its own plan says."
    fix = "Give all ranks the same rule, and apply it before any rank-dependent change."
    fix_changes = "Which collectives the ranks issue, and the shards that they hold."
    fix_leaves = "Checkpoints that were written with the differing plans."
    disproof = "The plans of this tensor, printed on each rank after wrapping, are the same."

    def check(self, view: ModelView) -> Iterator[Finding]:
        """Name the first tensor that is kept differently."""
        difference = first_difference(view)
        if difference is None:
            return
        culprits, has_culprit = odd_ranks(difference)
        what = ", ".join(f"{value} on {r.phrase()}" for value, r in difference.values.items())
        yield self.finding(
            f"ranks keep {difference.name} of {view.model} differently: {difference.aspect} {what}",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=(difference.name,),
            grade=_grade(difference, has_culprit=has_culprit),
            evidence=tuple(
                Evidence(
                    ranks=ranks,
                    summary=f"{difference.aspect} of {difference.name}: {value}",
                    location=location_on(view, ranks),
                )
                for value, ranks in difference.values.items()
            ),
        )


def _grade(difference: Difference, *, has_culprit: bool) -> Grade:
    if not difference.is_told:
        return Grade.NOTE
    return Grade.PROVEN if has_culprit else Grade.LIKELY
