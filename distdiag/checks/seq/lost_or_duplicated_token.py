"""SEQ001: tokens are lost or doubled where a sequence is split over ranks and gathered again."""

from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import TokenTraceCheck
from distdiag.findings.finding import Severity


class LostOrDuplicatedToken(TokenTraceCheck):
    """Tokens are lost or doubled where a sequence is split over ranks and gathered again.

    ## What you see
    Each lost token is missing from the loss, and each doubled token counts twice. Parts that
    overlap or leave gaps raise no error, because the shapes fit all the same.

    ## Example
        size = x.shape[1] // world_size
        # wrong: the last token of each part is the first of the next
        part = x[:, rank * size : (rank + 1) * size + 1]
        # right
        part = x[:, rank * size : (rank + 1) * size]

    ## How to fix
    Let the parts of all ranks cover the sequence exactly once. Pad the sequence to a multiple of
    the number of ranks before the split (`torch.nn.functional.pad`), and cut the padding off after
    the gather.

    Changes: The tokens that each rank computes on, and so the loss.

    Leaves: The order of the tokens, which another check compares.

    ## When it is not a defect
    The functions named in `[sequence]` are not intended to be the inverse of each other.

    If so, add `ignore = ["SEQ001"]` to `distdiag.toml`. A function that raised on all ranks is a
    note: it may not suit the shape that `[sequence]` gives.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.chunk.html
    - https://docs.pytorch.org/docs/stable/generated/torch.tensor_split.html
    """

    code = "SEQ001"
    name = "lost-or-duplicated-token"
    severity = Severity.ERROR
    kinds = (
        FaultKind.RAISED,
        FaultKind.LOST,
        FaultKind.DUPLICATED,
        FaultKind.PADDED,
    )
