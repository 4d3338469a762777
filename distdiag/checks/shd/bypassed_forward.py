"""SHD019: a model was called past DDP's forward pass."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import evidence_of, first_and_more, location_on, names_of
from distdiag.events.models import ReplicaEvidence
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import GradientReplicas


class BypassedForward(Check[GradientReplicas]):
    """A model was called past DDP, whose forward pass arms the reduction of gradients.

    ## What you see
    No error and no hang: the loss falls, but each rank trains on its own data alone, because DDP
    reduces gradients only after its own forward pass. The copies of the model diverge from this
    step on.

    ## Example
        ddp = DistributedDataParallel(model)
        # wrong: a method of the module inside, so that DDP does not see the call
        loss = ddp.module.compute_loss(batch)
        # right: `forward` of the module calls compute_loss
        loss = ddp(batch)

    ## How to fix
    Call the wrapper itself in training, as in `ddp(batch)`: look for a call of `ddp.module(...)`,
    of a method of it, or of the model from before it was wrapped. Let `forward` do what else is
    needed.

    Changes: Gradients become the mean over the ranks.

    Leaves: The copies that differ already since earlier steps.

    ## When it is not a defect
    The program reduces these gradients itself: right before the step they are equal on all ranks.

    If so, add `ignore = ["SHD019"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    code = "SHD019"
    name = "bypassed-forward"
    severity = Severity.ERROR

    def check(self, view: GradientReplicas) -> Iterator[Finding]:
        """Judge gradients of models that were called past their wrapper."""
        # DDP's reducer did not work since the last step, and no `no_sync` told it to wait.
        if view.evidence is not ReplicaEvidence.BYPASSED:
            return
        tensors = [tensor for tensor in view.tensors if not tensor.plan.is_late]
        if not tensors:
            return
        names = names_of(tensors)
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} differs between "
            f"{view.ranks.phrase()} when step {view.step} begins: the model was called, but not "
            "through DDP, which therefore reduced nothing",
            ranks=view.ranks,
            step=view.step,
            location=location_on(view, view.ranks),
            subjects=names,
            grade=Grade.PROVEN,
            evidence=evidence_of(view, tensors),
        )
