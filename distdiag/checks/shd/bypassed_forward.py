"""SHD019: a model that DDP keeps was used past DDP's forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import evidence_of, first_and_more, location_on, names_of
from distdiag.events.models import Basis, Moment
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import GradientReplicas


class BypassedForward(Check[GradientReplicas]):
    """A model was trained past the forward pass of DDP, which reduces no gradients then.

    ## What it detects
    When an optimizer is about to step: parameters that DDP keeps have gradients that differ between
    its ranks, DDP's reducer did not work since the step before, and it was not told to wait by
    `no_sync`.

    ## Why it matters
    The forward pass of DDP arms its reducer for the backward pass that follows. Past it, each rank
    trains on its own data alone, without any message, and the models part from this step on.

    ## Example
    `loss = ddp.module(inputs).sum()`, or `ddp.module.loss(inputs)`, a method other than `forward`.

    ## How to fix
    Call the wrapper itself, and let `forward` call what else is needed.

    ## References
    - `torch.nn.parallel.DistributedDataParallel`
    """

    code = "SHD019"
    name = "bypassed-forward"
    severity = Severity.ERROR

    why = "DDP's hooks on gradients do nothing until its own forward pass has armed the reducer."
    fix = "Call `ddp(inputs)` in training; let `forward` choose the method by an argument."
    fix_changes = "Gradients become the mean over the ranks."
    fix_leaves = "The copies that differ already since earlier steps."
    disproof = "The forward pass of the wrapper was called, with gradients, since the last step."

    def check(self, view: GradientReplicas) -> Iterator[Finding]:
        """Judge gradients of models whose wrapper had no hand in them."""
        if view.moment is not Moment.GRADIENT or view.basis is not Basis.BYPASSED:
            return
        tensors = [tensor for tensor in view.tensors if not tensor.plan.is_late]
        if not tensors:
            return
        names = names_of(tensors)
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} differs between "
            f"{view.ranks.phrase()} when step {view.step} begins: the model was called, but not "
            "through DDP, which reduced nothing",
            ranks=view.ranks,
            step=view.step,
            location=location_on(view, view.ranks),
            subjects=names,
            grade=Grade.PROVEN,
            evidence=evidence_of(view, tensors),
        )
