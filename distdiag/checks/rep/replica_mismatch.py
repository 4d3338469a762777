"""REP001: ranks hold different values of a tensor that should be the same."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import (
    evidence_of,
    first_and_more,
    grade_of,
    location_on,
    names_of,
    odd_ranks,
    unwritten_ranks,
)
from distdiag.events.models import Basis, Moment, TensorPlan
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import StartReplicas, StepReplicas


class ReplicaMismatch(Check[StartReplicas | StepReplicas]):
    """Ranks hold different values of a tensor that should be the same.

    ## What it detects
    A parameter or buffer, trainable or frozen, whose bytes differ between ranks when the model is
    used for the first time, although its mesh, its wrapper or the program itself says that these
    ranks hold copies of one tensor.

    ## Why it matters
    Gradients are averaged over copies as if they were one model. Each rank then trains, or is
    taught by, a model of its own; the loss looks plausible, and what is saved is one of them.

    ## Example
    `torch.manual_seed(rank)` before a model is built that nobody broadcasts; a checkpoint that only
    rank 0 has loaded into a frozen encoder.

    ## How to fix
    Build with the same seed on all ranks, load on all ranks, or broadcast parameters and buffers
    from rank 0 before the first step.

    ## References
    - pytorch/pytorch#111138, allenai/OLMo-core#319
    """

    code = "REP001"
    name = "replica-mismatch"
    severity = Severity.ERROR

    why = "Nothing makes copies equal that began differently: equal gradients keep the difference."
    fix = "Broadcast the tensors from the rank that has the right ones, before the first step."
    fix_changes = "The values on the other ranks, and so the course of the training."
    fix_leaves = "Optimizer state and anything that was computed from the wrong values before."
    disproof = "The digests of the tensor, computed on each rank at that moment, are the same."

    def check(self, view: StartReplicas | StepReplicas) -> Iterator[Finding]:
        """Judge what differs from the start, and does not look as if it had never been written."""
        # That the program reduces a gradient itself is seen when it has done so.
        is_late = view.basis is Basis.REDUCED and view.moment is Moment.STEP
        is_start = view.moment is Moment.START or (is_late and view.alike_at is None)
        if not is_start or unwritten_ranks(view.tensors):
            return
        tensors = [tensor for tensor in view.tensors if not _may_differ(tensor.plan)]
        if not tensors:
            return
        culprits, has_culprit = odd_ranks(tensors)
        names = names_of(tensors)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: {view.ranks.phrase()} should hold the same "
            f"and do not, from the start ({' / '.join(c.phrase() for c in tensors[0].camps)})",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            severity=Severity.WARNING if view.basis is Basis.BESIDE else None,
            grade=grade_of(view, has_culprit=has_culprit),
            confidence=0.95 if has_culprit else 0.9,
            evidence=evidence_of(view, tensors),
        )


def _may_differ(plan: TensorPlan) -> bool:
    """Say whether another check names it, or FSDP2 leaves it to the program."""
    is_own_buffer = plan.keeper == "FSDP2" and not plan.is_parameter and "int" in plan.dtype
    return plan.is_late or is_own_buffer
