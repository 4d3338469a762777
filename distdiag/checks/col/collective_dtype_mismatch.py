"""COL004: ranks call one collective with different dtypes."""

from collections.abc import Iterator

from distdiag.checks.col.mismatch import CallMismatch, each_group
from distdiag.checks.shared.culprits import group_by
from distdiag.checks.shared.explanations import unexplained
from distdiag.findings.descriptions import call_phrase, sizes_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class CollectiveDtypeMismatch(CallMismatch):
    """Ranks call one collective with different dtypes.

    ## What you see
    The call hangs, overruns memory, or ends with wrong values in every element. The backend
    exchanges bytes, and each rank reads the bytes as its own dtype (float16 and bfloat16 have the
    same width, so their mix gives no error).

    ## Example
        # wrong: rank 0 computes outside of autocast and reduces float32
        with torch.autocast("cuda", torch.bfloat16, enabled=rank != 0):
            loss = model(batch)
        dist.all_reduce(loss)

        # right: one dtype before the call
        loss = loss.float()
        dist.all_reduce(loss)

    ## How to fix
    Convert the tensor to the same dtype right before the call, on every rank:
    `tensor = tensor.to(torch.float32)`.

    Changes: The precision of what is exchanged, on the ranks that convert.

    Leaves: The reason why the dtypes differ: a cast, autocast or a checkpoint on some ranks.

    ## When it is not a defect
    The recorded dtypes of this call are the same on all ranks.

    To silence it, set `ignore = ["COL004"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/tree/main/torch/distributed/flight_recorder
    """

    code = "COL004"
    name = "collective-dtype-mismatch"
    severity = Severity.ERROR

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the dtypes that they passed."""
        if unexplained(alignment) is not Aspect.DTYPE:
            return
        groups = group_by(alignment, lambda call: frozenset(call.signature.dtypes))
        dtypes = each_group(
            alignment, groups, lambda call: "/".join(dict.fromkeys(call.signature.dtypes))
        )
        message = f"{call_phrase(alignment.any_event)} is called with different dtypes: {dtypes}"
        yield self.mismatch(alignment, groups, message, sizes_phrase)
