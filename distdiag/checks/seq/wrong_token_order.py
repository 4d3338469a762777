"""SEQ002: tokens come out of a gather in another order than they went into the split."""

from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import TokenTraceCheck
from distdiag.findings.finding import Severity


class WrongTokenOrder(TokenTraceCheck):
    """Tokens come out of a gather in another order than they went into the split.

    ## What you see
    The loss is wrong and still falls: labels, masks and positions belong to other tokens than the
    activations beside them. The gather joins the parts in a different order than the split cut
    them, and the shape is right all the same.

    ## Example
        # wrong: the split was in head-tail order
        dist.all_gather(parts, x)
        whole = torch.cat(parts, dim=1)
        # right
        dist.all_gather(parts, x)
        halves = [half for part in parts for half in part.chunk(2, dim=1)]
        whole = torch.cat(halves[::2] + halves[::-2], dim=1)

    ## How to fix
    Make the gather the inverse of the split: the same dimension, the same order of ranks, and the
    same order within a part.

    Changes: Which token is at which place, and so the loss.

    Leaves: The factors of gradients, which are compared only where the order is right.

    ## When it is not a defect
    The functions named in `[sequence]` are not intended to be the inverse of each other.

    If so, add `ignore = ["SEQ002"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_gather_into_tensor
    - https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """

    code = "SEQ002"
    name = "wrong-token-order"
    severity = Severity.ERROR
    kinds = (
        FaultKind.PERMUTED,
        FaultKind.OTHER_PART,
        FaultKind.MIXED,
        FaultKind.FOREIGN,
        FaultKind.WRONG_DIM,
    )
