"""PAR007: runs on different numbers of ranks are fed different samples."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Severity


class DataDisparity(Check[Divergence]):
    """Runs on different numbers of ranks are fed different samples.

    ## What you see
    The losses of the two runs cannot be compared: every other difference may follow from the data.
    The run on N ranks does not read the global batch of the run on one rank, or two data-parallel
    ranks read the same samples.

    ## Example
        # wrong: all ranks read the whole data set in the same order
        loader = DataLoader(data, batch_size=8)
        # right
        sampler = DistributedSampler(data, num_replicas=dp_size, rank=dp_rank, seed=0)
        loader = DataLoader(data, batch_size=8, sampler=sampler)

    ## How to fix
    Shard the data set over the data-parallel ranks, with one seed for all of them.

    Changes: Which samples an epoch holds, and so the loss curve.

    Leaves: Differences that come from the computation itself: compare again.

    ## When it is not a defect
    Each sample of the reference's step was read by exactly one data-parallel rank.

    If so, add `ignore = ["PAR007"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "PAR007"
    name = "data-disparity"
    severity = Severity.ERROR

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Say which samples differ."""
        if event.subject is not Subject.DATA:
            return
        message = f"{event.candidate} and {event.reference} see different data: {event.explanation}"
        yield self.finding(
            message,
            ranks=event.culprits,
            step=event.step,
            subjects=subjects_of(event),
            evidence=tuple(evidence_of(event)),
        )
