"""PAR017: a result depends on which samples are in one batch, so N ranks have another."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, subjects_of
from distdiag.events.comparisons import Divergence, Reason, Subject
from distdiag.findings.finding import Severity


class BatchDependence(DisparityCheck):
    """A result depends on which samples are in one batch, so N ranks have another than one.

    ## What you see
    The gradients of N ranks differ from those of one rank, although each rank computes the right
    result for its own batch. Something depends on the other samples in the batch (statistics,
    pairs, a capacity, a load), and one large batch gives a different result than N small ones.

    ## Example
        # of the batch of this rank
        scores = queries @ keys.T
        # of the global batch, if that is what you want
        scores = queries @ torch.cat(torch.distributed.nn.all_gather(keys)).T

    ## How to fix
    If you want the result of the global batch, compute what the finding names over all ranks:
    `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` for batch normalisation, gathered pairs
    for a contrastive loss, an all-reduce for a load or a capacity.

    Changes: The objective, and so losses that you compared before.

    Leaves: Other differences, which this one hides: compare again.

    ## When it is not a defect
    The result is intended to depend on the batch of each rank, as with batch normalisation,
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
            f"{what} of {event.candidate} differs from that of {event.reference}, because it "
            "depends on which samples share a batch: each rank is right for its own batch, but "
            "all samples in one batch give a different result "
            f"({figures(first)}){part}{doubt(event)}"
        )
