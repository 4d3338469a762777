"""SEQ003: gradients come back through split and gather with a wrong factor, or not at all."""

from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import TokenTraceCheck
from distdiag.findings.finding import Severity


class GatherGradientScale(TokenTraceCheck):
    """Gradients come back through split and gather multiplied by a wrong factor, or not at all.

    ## What you see
    The loss is right, but gradients are those of another learning rate, or lack what other ranks
    computed. The backward passes of split and gather do not fit the way in which parameters'
    gradients are reduced.

    ## Example
        class Gather(torch.autograd.Function):
            def backward(ctx, grad):
                # wrong, if all ranks have the same loss and gradients are summed over them
                dist.all_reduce(grad)
                return grad.chunk(size, dim=1)[rank]
                # right
                return grad.chunk(size, dim=1)[rank]

    ## How to fix
    Choose one convention: the backward pass of the gather takes its own part and parameters'
    gradients are summed over the ranks, or it sums and they are averaged.

    Changes: The size of the gradients before the split, and so clipping and the best learning rate.

    Leaves: Losses that are divided by wrong counts of tokens.

    ## When it is not a defect
    The program scales these gradients elsewhere; say how it reduces them in `[sequence]`
    (`reduction`).

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
