"""REP001: ranks hold different values of a tensor that should be the same."""

from collections.abc import Iterator
from typing import Final

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
from distdiag.events.models import ReplicaEvidence, TensorPlan
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import StartReplicas, StepReplicas

_KNOWN: Final = "should hold the same values but differ"
_UNKNOWN: Final = "hold different values"
_OF_UNKNOWN: Final = 0.3
"""Experts, stages and members of an ensemble differ as they should."""
_IF_SHARED: Final = {
    "why": "If these ranks should hold the same tensor, they train different models from the first "
    "step on, although the loss looks plausible, and the checkpoint holds the model of one rank.",
    "fix": "Nothing, if each rank has its own part here: an expert, a stage, a member of an "
    "ensemble. Else broadcast the tensor before the first step from the rank that has the right "
    "values: `dist.broadcast(tensor, src=0)`. Or build and load the model in the same way, with "
    "the same seed, on all ranks.",
}
"""What is said where nothing tells whether ranks should hold the same."""


class ReplicaMismatch(Check[StartReplicas | StepReplicas]):
    """Ranks hold different values of a tensor that should be the same.

    ## What you see
    The ranks train different models from the first step on, although the loss looks plausible, and
    the checkpoint holds the model of one rank. Gradients are averaged, but equal updates keep the
    difference that was there at the start.

    ## Example
        # wrong: each rank draws its own weights, and nobody broadcasts them
        torch.manual_seed(rank)
        model = build_model()
        # right
        model = build_model()
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)

    ## How to fix
    Before the first step, broadcast parameters and buffers from the rank that has the right values:
    `dist.broadcast(tensor, src=0)`. Or build and load the model in the same way, with the same
    seed, on all ranks.

    Changes: The values on the other ranks, and so the course of the training.

    Leaves: Optimizer state and everything else that was computed from the wrong values.

    ## When it is not a defect
    Each rank is intended to have its own values of this tensor, for example one member of an
    ensemble or its own expert.

    If so, add `ignore = ["REP001"]` to `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/111138
    - https://github.com/allenai/OLMo-core/issues/319
    """

    code = "REP001"
    name = "replica-mismatch"
    severity = Severity.ERROR

    def check(self, view: StartReplicas | StepReplicas) -> Iterator[Finding]:
        """Judge what differs from the start, and does not look as if it had never been written."""
        # That the program reduces a gradient itself is known only after it has done so.
        is_late = view.evidence is ReplicaEvidence.REDUCED and view.alike_at is None
        if not (isinstance(view, StartReplicas) or is_late) or unwritten_ranks(view.tensors):
            return
        tensors = [tensor for tensor in view.tensors if not _may_differ(tensor.plan)]
        if not tensors:
            return
        culprits, has_culprit = odd_ranks(tensors)
        groups = " / ".join(group.phrase() for group in tensors[0].groups)
        names = names_of(tensors)
        is_unknown = view.evidence is ReplicaEvidence.WORLD
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: {view.ranks.phrase()} "
            f"{_UNKNOWN if is_unknown else _KNOWN} from the start ({groups})",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            severity=Severity.WARNING if view.evidence is ReplicaEvidence.FROZEN else None,
            grade=grade_of(view, has_culprit=has_culprit),
            confidence=_OF_UNKNOWN if is_unknown else 0.95 if has_culprit else 0.9,
            evidence=evidence_of(view, tensors),
            **(_IF_SHARED if is_unknown else {}),
        )


def _may_differ(plan: TensorPlan) -> bool:
    """Say whether another check names it, or FSDP2 leaves it to the program."""
    is_own_buffer = plan.wrapper == "FSDP2" and not plan.is_parameter and "int" in plan.dtype
    return plan.is_late or is_own_buffer
