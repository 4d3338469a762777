"""SHD004: an optimizer applies gradients that were not reduced over all copies."""

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
from distdiag.events.models import ReplicaEvidence
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import GradientReplicas


class UnreducedGradient(Check[GradientReplicas]):
    """An optimizer applies gradients that differ between the copies of a parameter.

    ## What you see
    Each rank updates its copy by the gradient of its own batch, heads or tokens. From this step on
    the ranks train different models; the loss looks plausible.

    ## Example
        loss.backward()
        # right: these two lines; wrong: without them
        for norm in replicated_norms:
            dist.all_reduce(norm.weight.grad, group=tp_group)
        optimizer.step()

    ## How to fix
    All-reduce the gradient over all ranks that hold copies, once, after the last backward pass and
    before clipping and the step.

    Changes: The gradient of every copy: it becomes the mean or the sum over the ranks.

    Leaves: The copies that differ already since earlier steps.

    ## When it is not a defect
    The ranks are meant to train models of their own, or average their weights now and then.

    If so, add `ignore = ["SHD004"]` to `distdiag.toml`.

    ## References
    - https://github.com/bigcode-project/Megatron-LM/issues/37
    """

    code = "SHD004"
    name = "unreduced-gradient"
    severity = Severity.ERROR

    def check(self, view: GradientReplicas) -> Iterator[Finding]:
        """Judge gradients at the step."""
        if view.evidence in (*NOT_REDUCED, ReplicaEvidence.BYPASSED):  # SHD019 names the bypassed
            return
        tensors = [tensor for tensor in view.tensors if not tensor.plan.is_late]
        if not tensors:
            return
        names = names_of(tensors)
        # Steps inside no_sync may be meant: local ones, and an average now and then.
        is_meant = view.evidence is ReplicaEvidence.UNSYNCED and not view.num_unsynced_steps
        if view.evidence is ReplicaEvidence.OTHER_GROUPS and not view.num_unsynced_steps:
            return  # they may yet be reduced in another way
        never = f"; in {view.num_unsynced_steps} steps nothing as large was exchanged between them"
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} differs between "
            f"{view.ranks.phrase()}, which hold copies of it, when step {view.step} begins"
            f"{never if view.num_unsynced_steps else ''}",
            ranks=view.ranks,
            step=view.step,
            location=location_on(view, view.ranks),
            subjects=names,
            severity=Severity.WARNING
            if view.evidence is ReplicaEvidence.LONE or view.num_unsynced_steps
            else None,
            grade=Grade.NOTE if is_meant else grade_of(view, has_culprit=True),
            confidence=0.5 if is_meant else 0.95,
            evidence=evidence_of(view, tensors),
        )
