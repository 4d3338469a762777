"""REP003: copies of a tensor were the same and are not any more."""

from collections.abc import Iterator
from typing import Final

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
from distdiag.events.models import ReplicaEvidence
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import StepReplicas

_ALL_REDUCED: Final = (ReplicaEvidence.WRAPPER, ReplicaEvidence.REDUCED)
_FIX_REDUCED: Final = (
    "The gradients of these parameters are reduced, so look for what else some ranks alone do to "
    "them: a copy of averaged or loaded weights, a clamp or a reset under a condition on the rank, "
    "or a step that some ranks skip or take with another learning rate. Let all ranks do it."
)


class ReplicaDrift(Check[StepReplicas]):
    """Copies of a parameter were the same on all ranks and are not any more.

    ## What you see
    Each rank trains its own model, which differs more from the others with every step. The loss
    looks plausible, and the checkpoint holds the model of one rank.

    ## Example
        loss.backward()
        # wrong: each rank applies its own gradient
        optimizer.step()
        # right
        for p in replicated_parameters:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()

    ## How to fix
    Reduce the gradient over all ranks that hold the parameter, before every step
    (`dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`, or DDP). Then step on all of these ranks with
    the same learning rate.

    Changes: The update on each rank: the mean or sum over ranks instead of its own.

    Leaves: The difference between the ranks that exists already: broadcast the parameter once.

    ## When it is not a defect
    Each rank is intended to train this parameter for itself, or the ranks average it from time to
    time.

    If so, add `ignore = ["REP003"]` to `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA/Megatron-LM/issues/656
    """

    code = "REP003"
    name = "replica-drift"
    severity = Severity.ERROR

    def check(self, view: StepReplicas) -> Iterator[Finding]:
        """Judge parameters that were equal before."""
        plans = [(each, each.plan) for each in view.tensors]
        # MOE013 names biases of routers.
        tensors = [each for each, plan in plans if plan.is_parameter and not plan.is_routing_bias]
        if view.alike_at is None or view.evidence in NOT_REDUCED or not tensors:
            return
        culprits, has_culprit = odd_ranks(tensors)
        names = names_of(tensors)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: equal on {view.ranks.phrase()} until "
            f"step {view.alike_at}, different before step {view.step}",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            severity=Severity.WARNING
            if view.evidence in (ReplicaEvidence.LONE, ReplicaEvidence.LAYER)
            else None,
            grade=grade_of(view, has_culprit=has_culprit),
            confidence=0.9,
            evidence=evidence_of(view, tensors),
            fix=_FIX_REDUCED if view.evidence in _ALL_REDUCED else self.fix,
        )
