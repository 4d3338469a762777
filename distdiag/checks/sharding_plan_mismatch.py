"""SHD002: ranks shard one model differently."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.model_event import ModelPlan
from distdiag.model_view import ModelView
from distdiag.reasoning.plans import Difference, first_difference, odd_ranks
from distdiag.reasoning.replicas import location_on


class ShardingPlanMismatch(Check):
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
    needs = (ModelPlan,)

    why = "No backend compares plans: each rank sends and expects what its own plan says."
    fix = "Give all ranks the same rule, and apply it before any rank-dependent change."
    fix_changes = "Which collectives the ranks issue, and the shards that they hold."
    fix_leaves = "Checkpoints that were written with the differing plans."
    disproof = "The plans of this tensor, printed on each rank after wrapping, are the same."

    def check_model(self, view: ModelView) -> Iterator[Finding]:
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
