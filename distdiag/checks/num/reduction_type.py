"""NUM013: gradients are summed over one axis in another type than the policy says."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.updates import ReducedInType
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Severity


class ReductionType(Check[ReducedInType]):
    """Gradients are summed over one axis of a mesh in another type than the policy asks for.

    ## What you see
    `reduce_dtype=torch.float32` is set, and gradients of replicated parameters, such as norms
    under tensor parallelism, still lose the small parts of their sum: over the second axis of the
    mesh they are added up in the type of the gradient.

    ## Example
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        parallelize_module(model, mesh["tp"], {"norm": SequenceParallel()})
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)   # wrong: only "dp" is in float32

        fully_shard(model.norm, mesh=mesh["dp"])                # right: the norm computes in
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)   # float32, and so does its gradient

    ## How to fix
    Give the modules whose parameters are replicated along the other axis a unit of their own that
    computes in the type of the reduction, or use a version of PyTorch that casts before it reduces.

    Changes: The sum over that axis is exact to the type of the policy, with messages of its size.

    Leaves: Parameters that are sharded along that axis.

    ## When it is not a defect
    The axis has so few ranks that the rounding of its sum does not matter to you.

    If so, add `ignore = ["NUM013"]` to `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/190627
    """

    code = "NUM013"
    name = "reduction-type"
    severity = Severity.WARNING

    def check(self, view: ReducedInType) -> Iterator[Finding]:
        """Report what a rank has seen: the probe writes it down only if the types differ."""
        ranks = RankSet([view.rank])
        yield self.finding(
            f"the gradient of {view.parameter} is summed over the {view.axis_size} ranks of axis "
            f"{view.axis} in {view.dtype}, though its policy says reduce_dtype={view.reduce_dtype}",
            ranks=ranks,
            step=view.step,
            location=user_location(view.site.frames),
            subjects=(view.parameter,),
            evidence=f"FSDP2 gives the sum over {view.axis} a gradient in {view.dtype}, and casts "
            f"it to {view.reduce_dtype} behind it",
        )
