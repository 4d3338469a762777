"""PAR011: gradients on N ranks are not those of the same samples on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, figures, how_many, reason, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Grade, Severity


class GradientDisparity(Check[Divergence]):
    """Gradients on N ranks are not those of the same samples on one rank.

    ## What it detects
    Outputs and losses agree, and the gradient of a parameter differs between both runs by more
    than rounding explains. The first one in the order of the backward pass is named, and the
    factor or the weights that explain it.

    ## Why it matters
    The optimizer follows another gradient than it would on one rank, while the loss looks
    right.

    ## Example
    A gradient that is summed over ranks instead of averaged; one parameter that no reduction
    reaches.

    ## How to fix
    Look at what reduces this gradient: its group, its divisor, the number of times, and what is
    left out.

    ## References
    - torch.nn.parallel.DistributedDataParallel
    """

    code = "PAR011"
    name = "gradient-disparity"
    severity = Severity.ERROR

    why = "For the same samples the reduced gradient does not depend on how many ranks computed it."
    fix = "Correct the reduction of the named gradients: each share once, rightly divided."
    fix_changes = "The size or direction of the gradient, and so the effective learning rate."
    fix_leaves = "A learning rate that was tuned for the wrong gradient."
    disproof = "The whole gradients of both runs agree within the bound."

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Name the first gradient that differs, and what explains it."""
        if event.subject is not Subject.GRADIENT:
            return
        message = (
            f"at step {event.step} {how_many(event)} of {event.num_compared} gradients of "
            f"{event.candidate} differ from those of {event.reference}, first in backward order "
            f"{figures(event.differences[0])}{reason(event)}"
        )
        yield self.finding(
            message,
            ranks=event.culprits,
            step=event.step,
            subjects=subjects_of(event),
            evidence=evidence_of(event),
            grade=Grade.NOTE if event.is_doubtful else Grade.PROVEN,
        )
