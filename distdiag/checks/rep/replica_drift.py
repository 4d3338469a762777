"""REP003: copies of a tensor were the same and are not any more."""

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
    odd_ranks,
)
from distdiag.events.models import Basis, Moment
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import StepReplicas


class ReplicaDrift(Check[StepReplicas]):
    """Copies of a parameter were the same on all ranks and are not any more.

    ## What it detects
    A parameter that ranks hold copies of, equal when training began, and different at a later
    optimizer step by more than rounding. A warning for a router that is marked as a rank's own
    part, as its experts are, though it knows experts of all ranks and the rest of its block is
    shared.

    ## Why it matters
    Each rank goes on with a model of its own, further apart with every step. What is saved is one
    of them.

    ## Example
    A gradient that is not reduced over one of the groups; an optimizer that steps on some ranks
    only; noise that ranks draw from different seeds.

    ## How to fix
    Find what changes the parameter differently: gradients that are not reduced (SHD004), learning
    rates or step counters (REP004), or code that writes to it on some ranks.

    ## References
    - NVIDIA/Megatron-LM#656
    """

    code = "REP003"
    name = "replica-drift"
    severity = Severity.ERROR

    why = "Copies stay equal only while every rank applies the same update to them."
    fix = "Reduce the gradient over all ranks that hold the parameter, before every step."
    fix_changes = "The update on each rank: the mean or sum over ranks instead of its own."
    fix_leaves = "The difference that is there already: broadcast the parameter once."
    disproof = "The digests of the parameter on these ranks are the same after that step."

    def check(self, view: StepReplicas) -> Iterator[Finding]:
        """Judge parameters that were alike before."""
        if view.moment is not Moment.STEP or view.alike_at is None:
            return
        if view.basis in NOT_REDUCED:
            return
        tensors = [each for each in view.tensors if each.plan.is_parameter]
        tensors = [each for each in tensors if not each.plan.is_routing_bias]  # MOE013 names it
        if not tensors:
            return
        culprits, has_culprit = odd_ranks(tensors)
        names = names_of(tensors)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: the same on {view.ranks.phrase()} until "
            f"step {view.alike_at}, and different before step {view.step}",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            severity=Severity.WARNING if view.basis in (Basis.LONE, Basis.LAYER) else None,
            grade=grade_of(view, has_culprit=has_culprit),
            confidence=0.9,
            evidence=evidence_of(view, tensors),
        )
