"""SHD002: ranks shard one model differently."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import location_on
from distdiag.events.models import ReplicaEvidence, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ModelView


class Difference(NamedTuple):
    """The first aspect of a tensor in which ranks differ; `values` are ranks by what they have.

    Not `is_shared`: nothing says that ranks should hold the same tensor, or parts of one.
    """

    name: str
    aspect: str
    values: Mapping[str, RankSet]
    is_shared: bool = True


def first_difference(view: ModelView) -> Difference | None:
    """Return the first tensor, in the order of the model, that ranks keep differently.

    One that ranks are known to share comes before one that each rank may have for itself.
    """
    tables = {rank: {plan.name: plan for plan in plans} for rank, plans in view.by_rank.items()}
    names = dict.fromkeys(plan.name for plans in view.by_rank.values() for plan in plans)
    unshared: Difference | None = None
    for name in names:
        plans = {rank: table.get(name) for rank, table in tables.items()}
        difference = _difference(name, plans)
        if difference is None:
            continue
        if any(_is_shared(plan) for plan in plans.values() if plan is not None):
            return difference
        unshared = unshared or difference._replace(is_shared=False)
    return unshared


def _is_shared(plan: TensorPlan) -> bool:
    if plan.is_ignored and plan.evidence is ReplicaEvidence.WRAPPER:
        return False
    return (
        bool(plan.wrapper or plan.mesh or plan.placements)
        or plan.evidence is not ReplicaEvidence.WORLD
    )


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
    return plan.is_ignored or plan.evidence is ReplicaEvidence.OWN


def _presence(plan: TensorPlan | None) -> str:
    return "missing" if plan is None else "there"


def _aspects(plans: Mapping[int, TensorPlan]) -> Iterator[tuple[str, Mapping[int, str]]]:
    yield "global shape", {r: str(list(p.shape)) for r, p in plans.items()}
    yield "dtype", {r: p.dtype for r, p in plans.items()}
    yield "placement", {r: ", ".join(p.placements) or "not sharded" for r, p in plans.items()}
    yield "mesh", {r: str(p.mesh) for r, p in plans.items()}
    yield "wrapper", {r: p.wrapper or "none" for r, p in plans.items()}
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
    groups = sorted(difference.values.values(), key=len, reverse=True)
    if len(groups[0]) > len(groups[1]):
        return RankSet(rank for group in groups[1:] for rank in group), True
    return RankSet(rank for group in groups for rank in group), False


class ShardingPlanMismatch(Check[ModelView]):
    """Ranks shard or wrap one model differently.

    ## What you see
    The job hangs, aborts on tensors of different sizes, or trains on tensors that do not belong
    together. Each rank gathers and reduces by its own plan, and no backend compares the plans.

    ## Example
        # wrong: the layer is trained everywhere but on rank 0
        if rank == 0:
            model.layers[0].requires_grad_(False)
        fully_shard(model)
        # right
        model.layers[0].requires_grad_(False)
        fully_shard(model)

    ## How to fix
    Compute the plan from the configuration and the model alone (not from the rank, its memory or
    its files), so that it is the same on all ranks.

    Changes: Which collectives the ranks issue, and the shards that they hold.

    Leaves: Checkpoints that were written with the different plans.

    ## When it is not a defect
    Each rank is intended to have this tensor for itself, as its own part of a model.

    If so, add `ignore = ["SHD002"]` to `distdiag.toml`. Where nothing says that ranks share it, it
    is only a note.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    - https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    """

    code = "SHD002"
    name = "sharding-plan-mismatch"
    severity = Severity.ERROR

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
    if not difference.is_shared:
        return Grade.NOTE
    return Grade.PROVEN if has_culprit else Grade.LIKELY
