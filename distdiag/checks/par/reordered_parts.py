"""PAR019: a function puts the parts of a sequence together in another order than they were."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, subjects_of
from distdiag.events.comparisons import Divergence, Reason
from distdiag.findings.finding import Severity


class ReorderedParts(DisparityCheck):
    """A function puts the parts of a sequence together in another order than they were.

    ## What you see
    The gradients are wrong, although the loss may look right. The function returns for each sample
    the same values on N ranks as on one, but in a different order, so labels, masks or advantages
    that are combined with them belong to other positions.

    ## Example
        # wrong: undoes a zigzag order that contiguous parts never had
        whole = zigzag_to_order(gather(part))
        # right: the order in which the sequence was split
        whole = gather(part)

    ## How to fix
    Concatenate the parts in the order in which the sequence was split over the ranks. If the split
    was zigzag or interleaved, undo that order after the gather.

    Changes: The gradients of everything that is computed from the sequence.

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
            f"at step {event.step} {function} returns the values of {event.reference} in a "
            f"different order in {event.candidate}{follows if rest else ''}{doubt(event)}"
        )
