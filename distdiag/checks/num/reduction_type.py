"""NUM013: gradients are summed over one axis in another type than the policy says."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Severity
from distdiag.views.updates import ReductionView


class ReductionType(Check[ReductionView]):
    """Gradients are summed over one axis of a mesh in another type than the policy asks for.

    ## What you see
    Gradients of replicated parameters (for example norms under tensor parallelism) lose the small
    parts of their sum, although `reduce_dtype=torch.float32` is set. Over the second axis of the
    mesh FSDP2 adds them up in the dtype of the gradient.

    ## Example
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        parallelize_module(model, mesh["tp"], {"norm": SequenceParallel()})
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)   # wrong: only "dp" is in float32

        fully_shard(model.norm, mesh=mesh["dp"])                # right: the norm computes in
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)   # float32, and so does its gradient

    ## How to fix
    Call `fully_shard` separately on the modules whose parameters are replicated along the other
    axis, with `MixedPrecisionPolicy(param_dtype=torch.float32)`. Or use a version of PyTorch that
    casts before it reduces.

    Changes: The sum over that axis is as exact as the policy asks, and its messages are larger.

    Leaves: Parameters that are sharded along that axis.

    ## When it is not a defect
    The axis has so few ranks that the rounding of the sum is acceptable.

    If so, add `ignore = ["NUM013"]` to `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/190627
    """

    code = "NUM013"
    name = "reduction-type"
    severity = Severity.WARNING

    def check(self, view: ReductionView) -> Iterator[Finding]:
        """Report what ranks have seen: the probe writes it down only if the types differ."""
        seen = view.any_event
        yield self.finding(
            f"the gradient of {seen.parameter} is summed over the {seen.axis_size} ranks of axis "
            f"{seen.axis} in {seen.dtype}, though its policy says reduce_dtype={seen.reduce_dtype}",
            ranks=view.ranks,
            step=seen.step,
            location=user_location(seen.site.frames),
            subjects=(seen.parameter,),
            evidence=f"FSDP2 gives the sum over {seen.axis} a gradient in {seen.dtype}, and casts "
            f"it to {seen.reduce_dtype} after the sum",
        )
