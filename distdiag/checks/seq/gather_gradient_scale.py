"""SEQ003: gradients come back through split and gather with a wrong factor, or not at all."""

from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import TokenTraceCheck
from distdiag.findings.finding import Severity


class GatherGradientScale(TokenTraceCheck):
    """Gradients come back through split and gather multiplied by a wrong factor, or not at all.

    ## What you see
    The loss is right, but gradients are too large or too small, or lack the part of other ranks.
    The backward passes of the split and the gather do not match the way in which the gradients of
    parameters are reduced.

    ## Example
        class Gather(torch.autograd.Function):
            def backward(ctx, grad):
                # wrong, if all ranks have the same loss and gradients are summed over them
                dist.all_reduce(grad)
                return grad.chunk(size, dim=1)[rank]
                # right
                return grad.chunk(size, dim=1)[rank]

    ## How to fix
    Choose one of two conventions. Either the backward pass of the gather keeps only its own part,
    and the gradients of parameters are summed over the ranks. Or the backward pass sums, and the
    gradients of parameters are averaged.

    Changes: The size of the gradients before the split, and so clipping and the best learning rate.

    Leaves: Losses that are divided by a wrong number of tokens.

    ## When it is not a defect
    The program scales these gradients at a different place; declare in `[sequence]` how it reduces
    them (`reduction`).

    If so, add `ignore = ["SEQ003"]` to `distdiag.toml`. Where `reduction` is not given, a common
    factor is a note.

    ## References
    - https://github.com/pytorch/pytorch/blob/main/torch/distributed/nn/functional.py
    - https://github.com/pytorch/pytorch/blob/main/torch/distributed/_functional_collectives.py
    """

    code = "SEQ003"
    name = "gather-gradient-scale"
    severity = Severity.ERROR
    kinds = (FaultKind.GRADIENT,)
