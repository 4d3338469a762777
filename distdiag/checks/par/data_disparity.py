"""PAR007: runs on different numbers of ranks are fed different samples."""

from distdiag.checks.par.divergence import DisparityCheck
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Severity


class DataDisparity(DisparityCheck):
    """Runs on different numbers of ranks are fed different samples.

    ## What you see
    The losses of the two runs cannot be compared, because every other difference may come from the
    data. The run on N ranks does not read the global batch of the run on one rank, or two
    data-parallel ranks read the same samples.

    ## Example
        # wrong: all ranks read the whole data set in the same order
        loader = DataLoader(data, batch_size=8)
        # right
        sampler = DistributedSampler(data, num_replicas=dp_size, rank=dp_rank, seed=0)
        loader = DataLoader(data, batch_size=8, sampler=sampler)

    ## How to fix
    Divide the data over the data-parallel ranks, with the same seed on all of them:
    `DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank, seed=0)`.

    Changes: The samples of an epoch, and so the loss curve.

    Leaves: Differences that come from the computation itself: compare again.

    ## When it is not a defect
    Each sample of the reference's step was read by exactly one data-parallel rank.

    If so, say `--accept PAR007`.

    ## References
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "PAR007"
    name = "data-disparity"
    severity = Severity.ERROR
    subject = Subject.DATA
    may_be_meant = False

    def message(self, event: Divergence) -> str:
        """Say which samples differ."""
        return f"{event.candidate} and {event.reference} see different data: {event.explanation}"
