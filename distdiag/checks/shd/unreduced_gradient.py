"""SHD004: an optimizer applies gradients that were not reduced over all copies."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import (
    NOT_REDUCED,
    evidence_of,
    first_and_more,
    grade_of,
    location_on,
    names_of,
)
from distdiag.events.models import Basis, Moment
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import GradientReplicas


class UnreducedGradient(Check[GradientReplicas]):
    """An optimizer applies gradients that differ between the copies of a parameter.

    ## What it detects
    A parameter that ranks hold copies of, whose gradient differs between them, by more than
    rounding, when an optimizer is about to step.

    ## Why it matters
    Each copy gets an update of its own. From this step on the ranks train different models.

    ## Example
    A norm or router that is replicated over the tensor-parallel group and whose gradient nobody
    sums there; a wrong process group; `no_sync` left on for the last micro-batch.

    ## How to fix
    Reduce the gradient over every group that holds copies, once, after the last backward pass and
    before clipping and the step.

    ## References
    - bigcode-project/Megatron-LM#37
    """

    code = "SHD004"
    name = "unreduced-gradient"
    severity = Severity.ERROR

    why = "A backward pass gives each rank the gradient of its own batch, heads or tokens."
    fix = "All-reduce the gradient over these ranks after the last backward pass of the step."
    fix_changes = "The gradient of every copy: it becomes the mean or the sum over the ranks."
    fix_leaves = "The copies that differ already since earlier steps."
    disproof = "The gradients of the parameter on these ranks are equal when the step begins."

    def check(self, view: GradientReplicas) -> Iterator[Finding]:
        """Judge gradients at the step."""
        # Where DDP was bypassed, SHD019 says so.
        if view.moment is not Moment.GRADIENT or view.basis in (*NOT_REDUCED, Basis.BYPASSED):
            return
        tensors = [tensor for tensor in view.tensors if not tensor.plan.is_late]
        if not tensors:
            return
        names = names_of(tensors)
        # Steps inside no_sync may be meant: local ones, and an average now and then.
        is_meant = view.basis is Basis.UNSYNCED and not view.apart_for
        if view.basis is Basis.SIBLING and not view.apart_for:
            return  # they may yet be reduced in another way
        never = f"; in {view.apart_for} steps nothing as large was exchanged between them"
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} differs between "
            f"{view.ranks.phrase()}, which hold copies of it, when step {view.step} begins"
            f"{never if view.apart_for else ''}",
            ranks=view.ranks,
            step=view.step,
            location=location_on(view, view.ranks),
            subjects=names,
            severity=Severity.WARNING if view.basis is Basis.LONE or view.apart_for else None,
            grade=Grade.NOTE if is_meant else grade_of(view, has_culprit=True),
            confidence=0.5 if is_meant else 0.95,
            evidence=evidence_of(view, tensors),
        )
