"""COL005: ranks reduce one tensor with different operations."""

from collections.abc import Iterator

from distdiag.checks.col.mismatch import CallMismatch, each_group
from distdiag.checks.shared.culprits import group_by
from distdiag.checks.shared.explanations import unexplained
from distdiag.findings.descriptions import call_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class ReduceOpMismatch(CallMismatch):
    """Ranks reduce one tensor with different operations.

    ## What you see
    Nothing fails, but the ranks continue with different, wrong results. Each rank combines the
    values by its own operation, and no backend compares the operations.

    ## Example
        # wrong: MAX on rank 0, the default SUM elsewhere
        if rank == 0:
            dist.all_reduce(metric, op=dist.ReduceOp.MAX)
        else:
            dist.all_reduce(metric)

        # right
        dist.all_reduce(metric, op=dist.ReduceOp.MAX)

    ## How to fix
    Pass the same operation on every rank, and write it out:
    `dist.all_reduce(tensor, op=dist.ReduceOp.SUM)`.

    Changes: The reduced values, and what was derived from them.

    Leaves: State that already contains wrong values, for example checkpoints.

    ## When it is not a defect
    All ranks' records of this call show the same ReduceOp.

    To silence it, set `ignore = ["COL005"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.ReduceOp
    """

    code = "COL005"
    name = "reduce-op-mismatch"
    severity = Severity.ERROR

    # Only where the operation is known on every rank: calls that DDP makes in C++ show none.

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the operation that they reduce with."""
        if unexplained(alignment) is not Aspect.REDUCE_OP:
            return
        groups = group_by(alignment, lambda call: call.signature.reduce_op)
        ops = each_group(alignment, groups, lambda call: call.signature.reduce_op)
        yield self.mismatch(
            alignment,
            groups,
            f"{call_phrase(alignment.any_event)} reduces with different operations: {ops}",
            lambda call: f"reduces with {call.signature.reduce_op}",
        )
