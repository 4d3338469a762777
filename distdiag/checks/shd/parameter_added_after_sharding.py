"""SHD003: a trainable parameter was added to a model that was sharded before."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import evidence_of, first_and_more, location_on, names_of
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import GradientReplicas, StartReplicas


class ParameterAddedAfterSharding(Check[StartReplicas | GradientReplicas]):
    """A trainable parameter was added to a model that FSDP2 had sharded before.

    ## What you see
    Each rank trains its own version of the parameter, and the checkpoint holds that of rank 0.
    FSDP2 manages only the parameters that exist when `fully_shard` is called: it does not reduce
    the gradients of parameters that are added later.

    ## Example
        # wrong: the adapters come after sharding
        fully_shard(model)
        inject_lora(model)
        # right
        inject_lora(model)
        fully_shard(model)

    ## How to fix
    Add the parameters before the call of `fully_shard(model)`, with the same values on all ranks.
    If that is impossible, broadcast them once (`dist.broadcast(p.data, src=0)`) and all-reduce
    their gradients before every step.

    Changes: The parameters become shards; create the optimizer after that.

    Leaves: Values and optimizer state that have already diverged.

    ## When it is not a defect
    The program broadcasts the parameter and reduces its gradient itself before each step.

    If so, add `ignore = ["SHD003"]` to `distdiag.toml`.

    ## References
    - https://github.com/hao-ai-lab/FastVideo/issues/1666
    - https://github.com/huggingface/transformers/issues/48792
    """

    code = "SHD003"
    name = "parameter-added-after-sharding"
    severity = Severity.ERROR

    def check(self, view: StartReplicas | GradientReplicas) -> Iterator[Finding]:
        """Name the parameters that were added too late and differ between ranks."""
        late = [tensor for tensor in view.tensors if tensor.plan.is_late]
        if not late:
            return
        names = names_of(late)
        what = "values" if isinstance(view, StartReplicas) else "gradients"
        yield self.finding(
            f"{first_and_more(names)} of {view.model} were added after the model was sharded, "
            f"and {view.ranks.phrase()} hold different {what}",
            ranks=view.ranks,
            step=view.step,
            location=location_on(view, view.ranks),
            subjects=names,
            evidence=evidence_of(view, late),
        )
