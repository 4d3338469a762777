"""PAR019: a function puts the parts of a sequence together in another order than they were."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, subjects_of
from distdiag.events.comparisons import Divergence, Reason
from distdiag.findings.finding import Severity


class ReorderedParts(DisparityCheck):
    """A function puts the parts of a sequence together in another order than they were.

    ## What you see
    A function returns for each sample the same values on N ranks as on one, in another order. What
    is combined with them afterwards (labels, masks, advantages) belongs to other positions, so the
    loss may look right and the gradients are wrong.

    ## Example
        # wrong: undoes a zigzag order that contiguous parts never had
        whole = zigzag_to_order(gather(part))
        # right: the order in which the sequence was split
        whole = gather(part)

    ## How to fix
    Put the parts together in the order in which the sequence was split over the ranks.

    Changes: The gradients of all that is computed from the sequence.

    Leaves: Other functions that rely on the same order.

    ## When it is not a defect
    All that is combined with the result has the same order. Then the gradients agree.

    ## References
    - https://github.com/modelscope/ms-swift/pull/10071
    """

    code = "PAR019"
    name = "reordered-parts"
    severity = Severity.ERROR
    reason: ClassVar[Reason] = Reason.ORDER

    def message(self, event: Divergence) -> str:
        """Name the function, and what follows from it."""
        function, *rest = subjects_of(event)
        follows = (
            f"; the {event.subject.value} differs from here on ({figures(event.differences[1])})"
        )
        return (
            f"at step {event.step} {function} returns the values of {event.reference} in another "
            f"order in {event.candidate}{follows if rest else ''}{doubt(event)}"
        )
