"""PAR017: a result depends on which samples are in one batch, so N ranks have another."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, subjects_of
from distdiag.events.comparisons import Divergence, Reason, Subject
from distdiag.findings.finding import Severity


class BatchDependence(DisparityCheck):
    """A result depends on which samples are in one batch, so N ranks have another than one.

    ## What you see
    Each rank computes what is right for its own batch: alone with the same samples it has the same
    gradients, and the run averages them. With the samples of all ranks in one batch they are
    others, since something is computed over the batch: statistics, pairs, a capacity, a load.

    ## Example
        # of the batch of this rank
        scores = queries @ keys.T
        # of the global batch, if that is what you want
        scores = queries @ torch.cat(torch.distributed.nn.all_gather(keys)).T

    ## How to fix
    If the result shall be that of the global batch, compute what is named over all ranks:
    `SyncBatchNorm`, gathered pairs, a load or a capacity that is reduced first.

    Changes: The objective, and with it losses that were compared before.

    Leaves: Other differences, which this one hides: compare again.

    ## When it is not a defect
    The result is meant to be that of the batch of each rank, as with batch normalisation,
    contrastive losses over local pairs, or load balancing per rank. Say so with `--accept PAR017`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    """

    code = "PAR017"
    name = "batch-dependence"
    severity = Severity.WARNING
    reason: ClassVar[Reason] = Reason.BATCH

    def message(self, event: Divergence) -> str:
        """Say what differs, and that each rank is right about its own batch."""
        first = event.differences[0]
        what = {
            Subject.OUTPUT: f"the output of {subjects_of(event)[0]}",
            Subject.LOSS: "the loss",
        }.get(event.subject, "the gradient")
        part = f"; {event.explanation}" if event.explanation else ""
        return (
            f"{what} of {event.candidate} is not that of {event.reference}, because it depends on "
            f"which samples are in one batch: each rank has the gradients that its own batch gives "
            f"alone, all samples in one batch give others ({figures(first)}){part}{doubt(event)}"
        )
