"""PAR007: runs on different numbers of ranks are fed different samples."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Severity


class DataDisparity(Check[Divergence]):
    """Runs on different numbers of ranks are fed different samples.

    ## What it detects
    The samples of a run on N ranks are not those of the run on one rank with the same global
    batch, or two data-parallel ranks get the same ones.

    ## Why it matters
    Everything else differs in consequence: no comparison of losses says anything before the
    data are the same.

    ## Example
    A loader without a `DistributedSampler`, so that all ranks read the whole data set in the
    same order.

    ## How to fix
    Give each data-parallel rank its own part: a `DistributedSampler` with the size and rank of
    the data-parallel group, seeded alike on all ranks.

    ## References
    - torch.utils.data.distributed.DistributedSampler
    """

    code = "PAR007"
    name = "data-disparity"
    severity = Severity.ERROR

    why = "Which sample a rank reads depends on its sampler's number of replicas, rank and seed."
    fix = "Shard the data set over the data-parallel ranks, with one seed for all of them."
    fix_changes = "Which samples an epoch holds, and so the loss curve."
    fix_leaves = "Differences that come from the computation itself: compare again."
    disproof = "Each sample of the reference's step was read by exactly one data-parallel rank."

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
            evidence=evidence_of(event),
        )
