"""SHD003: a trainable parameter was added to a model that was sharded before."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import evidence_of, first_and_more, location_on, names_of
from distdiag.events.models import Moment
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import GradientReplicas, StartReplicas


class ParameterAddedAfterSharding(Check[StartReplicas | GradientReplicas]):
    """A trainable parameter was added to a model that FSDP2 had sharded before.

    ## What it detects
    A parameter below a module of FSDP2 that did not exist when the module was wrapped, that FSDP2
    does not manage, and whose values or gradients differ between ranks.

    ## Why it matters
    FSDP2 manages the parameters that it finds when it wraps. Later ones it neither broadcasts nor
    reduces: each rank trains its own, and a checkpoint holds that of rank 0.

    ## Example
    LoRA adapters that are injected after `fully_shard(model)`.

    ## How to fix
    Add the parameters before the model is sharded. If that cannot be, broadcast them once and
    all-reduce their gradients before every step.

    ## References
    - hao-ai-lab/FastVideo#1666, huggingface/transformers#48792
    """

    code = "SHD003"
    name = "parameter-added-after-sharding"
    severity = Severity.ERROR

    why = "The hooks of FSDP2 serve the parameters that were there when it wrapped the module."
    fix = "Inject the parameters first and call `fully_shard` afterwards."
    fix_changes = "The parameters become shards, and an optimizer must be made of the new ones."
    fix_leaves = "Values and optimizer state that have parted already."
    disproof = "The gradient of the parameter is reduced elsewhere before each step."

    def check(self, view: StartReplicas | GradientReplicas) -> Iterator[Finding]:
        """Name the parameters that came too late, and differ for it."""
        late = [tensor for tensor in view.tensors if tensor.plan.is_late]
        if not late or view.moment not in (Moment.START, Moment.GRADIENT):
            return
        names = names_of(late)
        what = "values" if view.moment is Moment.START else "gradients"
        yield self.finding(
            f"{first_and_more(names)} of {view.model} came after the model had been sharded, and "
            f"{view.ranks.phrase()} hold different {what}",
            ranks=view.ranks,
            step=view.step,
            location=location_on(view, view.ranks),
            subjects=names,
            evidence=evidence_of(view, late),
        )
