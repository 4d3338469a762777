"""PAR020: gradients of what the ranks of one axis share are off by the number of these ranks."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, listed
from distdiag.events.comparisons import Divergence, Reason
from distdiag.findings.finding import Severity


class SharedGradientFactor(DisparityCheck):
    """Gradients of what the ranks of one axis share are off by the number of these ranks.

    ## What you see
    A parameter that all ranks of a tensor-, context- or expert-parallel group hold wholly gets a
    gradient that is divided, or multiplied, by their number. All other gradients agree, so the loss
    looks right and these parameters learn at another rate.

    ## Example
        # wrong: the sum over ranks makes the value right, the gradient stays 1/size
        part = F.linear(x, weight, bias / size)
        # right: the value is divided, the gradient is not
        part = F.linear(x, weight, bias + (bias / size - bias).detach())

    ## How to fix
    Add a shared bias once, after the parts have been summed, or divide its value only. If the
    gradients are too large, do not sum them over ranks that have the whole gradient each.

    Changes: How fast the named parameters learn.

    Leaves: What they have learnt so far.

    ## When it is not a defect
    The learning rates of these parameters make up for the factor. Say so with `--accept PAR020`.

    ## References
    - https://github.com/pytorch/torchtitan/pull/4332
    """

    code = "PAR020"
    name = "shared-gradient-factor"
    severity = Severity.ERROR
    reason: ClassVar[Reason] = Reason.AXIS

    def message(self, event: Divergence) -> str:
        """Name the parameters and the factor."""
        return (
            f"at step {event.step} the gradients of {listed(event)} in {event.candidate} differ "
            f"from those of {event.reference}: {event.explanation}; the other gradients agree, of "
            f"{event.num_compared} in all ({figures(event.differences[0])}){doubt(event)}"
        )
