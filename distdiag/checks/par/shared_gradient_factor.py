"""PAR020: gradients of what the ranks of one axis share are off by the number of these ranks."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, listed
from distdiag.events.comparisons import Divergence, Reason
from distdiag.findings.finding import Severity


class SharedGradientFactor(DisparityCheck):
    """Gradients of what the ranks of one axis share are off by the number of these ranks.

    ## What you see
    These parameters learn at a wrong rate, although the loss looks right and all other gradients
    agree. All ranks of a tensor-, context- or expert-parallel group hold the parameter as a whole,
    and its gradient is divided, or multiplied, by the number of these ranks.

    ## Example
        # wrong: the sum over ranks makes the value right, the gradient stays 1/size
        part = F.linear(x, weight, bias / size)
        # right: the value is divided, the gradient is not
        part = F.linear(x, weight, bias + (bias / size - bias).detach())

    ## How to fix
    If the gradient is too small: add a shared bias once, after the sum over the parts, not divided
    by the number of ranks on each rank. If it is too large: do not sum gradients over ranks that
    each have the whole gradient.

    Changes: How fast the named parameters learn.

    Leaves: What the parameters have learnt so far.

    ## When it is not a defect
    The learning rates of these parameters compensate for the factor. Say so with `--accept PAR020`.

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
