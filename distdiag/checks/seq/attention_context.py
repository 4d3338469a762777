"""SEQ004: a token attends to other tokens than it should when the sequence is split over ranks."""

from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import TokenTraceCheck
from distdiag.findings.finding import Severity


class AttentionContext(TokenTraceCheck):
    """A token attends to other tokens than it should when the sequence is split over ranks.

    ## What you see
    The model trains on contexts that it will not have later: a token sees later tokens or other
    documents, or does not see the tokens of other ranks; the loss may even be lower. Each rank
    computes attention for its own part of the sequence with a mask, lengths or positions that do
    not fit this part.

    ## Example
        # wrong: documents of a packed row attend to one another
        out = ring_attention(q, k, v, causal=True)
        # right
        out = ring_attention(q, k, v, causal=True, cu_seqlens=cu_seqlens)

    ## How to fix
    Give the attention of every rank the mask, the document lengths and the positions of the whole
    sequence, split in the same way as the tokens.

    Changes: What each token attends to, and so all activations after the attention.

    Leaves: The order of the tokens and the gradients, which other checks compare.

    ## When it is not a defect
    The attention is intended to have a different context; declare it in `[sequence]` (`causal`,
    `documents`).

    If so, add `ignore = ["SEQ004"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    - https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
    """

    code = "SEQ004"
    name = "attention-context"
    severity = Severity.ERROR
    kinds = (FaultKind.CONTEXT,)
