"""COL005: ranks reduce one tensor with different operations."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    blame,
    camp_evidence,
    grade_of,
    group_by,
    location_in,
    step_of,
)
from distdiag.checks.shared.explanations import unexplained
from distdiag.findings.descriptions import call_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class ReduceOpMismatch(Check[CollectiveView]):
    """Ranks reduce one tensor with different operations.

    ## What it detects
    One `all_reduce`, `reduce` or `reduce_scatter` for which the ranks gave different values of
    `ReduceOp`. It speaks only where the operation is known on every rank: calls that DDP makes in
    C++ show none.

    ## Why it matters
    No backend compares the operation. Each rank combines what it gets in its own way, so the call
    ends well and the ranks hold different, wrong results.

    ## Example
    A metric is reduced with MAX on the main process and with the default SUM on the others.

    ## How to fix
    Pass the same `op` on every rank.

    ## References
    - `torch.distributed.ReduceOp`
    """

    code = "COL005"
    name = "reduce-op-mismatch"
    severity = Severity.ERROR

    why = "No backend compares the operation: the call succeeds, and each rank has its own result."
    fix = "Pass the same ReduceOp on every rank; spell it out where one side relies on the default."
    fix_changes = "The reduced values, and what was derived from them."
    fix_leaves = "State that the wrong values have already reached, such as checkpoints."
    disproof = "All ranks' records of this call show the same ReduceOp."

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the operation that they reduce with."""
        if alignment.kind != "collective" or unexplained(alignment) is not Aspect.REDUCE_OP:
            return
        camps = group_by(alignment, lambda call: call.signature.reduce_op)
        verdict = blame(alignment, camps)
        what = ", ".join(
            f"{alignment.by_rank[min(camp)].signature.reduce_op} on {camp.phrase()}"
            for camp in camps
        )
        yield self.finding(
            f"{call_phrase(alignment.any_event)} reduces with different operations: {what}",
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            grade=grade_of(alignment, verdict),
            confidence=verdict.confidence,
            evidence=camp_evidence(
                alignment, camps, lambda call: f"reduces with {call.signature.reduce_op}"
            ),
        )
