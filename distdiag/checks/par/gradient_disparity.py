"""PAR011: gradients on N ranks are not those of the same samples on one rank."""

from distdiag.checks.par.divergence import (
    DisparityCheck,
    because,
    figures,
    how_many,
)
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Severity


class GradientDisparity(DisparityCheck):
    """Gradients on N ranks are not those of the same samples on one rank.

    ## What you see
    The loss looks right, but the optimizer gets different gradients than on one rank. The finding
    names the first gradient that differs by more than rounding, with the factor or the weights that
    explain it.

    ## Example
        for p in model.parameters():
            # wrong: the sum is N times the gradient of one rank
            dist.all_reduce(p.grad)
            # right
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)

    ## How to fix
    Correct the reduction of the named gradients: its process group, its divisor, how often it runs,
    and what it leaves out.

    Changes: The size or direction of the gradient, and so the effective learning rate.

    Leaves: A learning rate that was tuned for the wrong gradient.

    ## When it is not a defect
    The gradient is intended to depend on the number of ranks, as with a loss that is summed over
    them.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    code = "PAR011"
    name = "gradient-disparity"
    severity = Severity.ERROR
    subject = Subject.GRADIENT

    def message(self, event: Divergence) -> str:
        """Name the first gradient that differs, and what explains it."""
        return (
            f"at step {event.step} {how_many(event)} of {event.num_compared} gradients of "
            f"{event.candidate} differ from those of {event.reference}, first in backward order "
            f"{figures(event.differences[0])}{because(event)}"
        )
