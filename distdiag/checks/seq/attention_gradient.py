"""SEQ009: split attention computes the right output and a wrong gradient."""

from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import TokenTraceCheck
from distdiag.findings.finding import Severity


class AttentionGradient(TokenTraceCheck):
    """Split attention computes the right output and a wrong gradient.

    ## What you see
    The loss is right in every step, but the model learns from wrong gradients. The backward pass of
    split attention is written by hand and differs from that of plain attention.

    ## Example
        # in the backward pass of ring attention
        for step in range(num_ranks):
            grads(q, saved_k, saved_v)   # wrong: the own chunk in every step
            grads(q, k_here, v_here)     # right: the chunk that came round
            k_here, v_here = send_recv(k_here, v_here)

    ## How to fix
    Use in each step of the backward pass the same chunk and mask as in the forward pass, and send
    the summed gradient back to the rank that holds the chunk.

    Changes: The gradients of the projections before attention, and of all layers before them.

    Leaves: Weights that were trained with the wrong gradients.

    ## When it is not a defect
    The gradients equal those of the same attention over the gathered rows.

    If so, add `ignore = ["SEQ009"]` to `distdiag.toml`.

    ## References
    - https://github.com/huggingface/diffusers/issues/14265
    """

    code = "SEQ009"
    name = "attention-gradient"
    severity = Severity.ERROR
    kinds = (FaultKind.ATTENTION_GRADIENT,)
