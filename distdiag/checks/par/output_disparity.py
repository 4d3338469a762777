"""PAR009: a module returns something else on N ranks than on one, for the same samples."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, figures, reason, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Grade, Severity


class OutputDisparity(Check[Divergence]):
    """A module returns something else on N ranks than on one, for the same samples.

    ## What it detects
    With the same weights and samples the output of a module differs between both runs by more
    than rounding explains; no module that ended before it differs.

    ## Why it matters
    The forward pass computes another function when it is distributed: loss and gradients
    follow.

    ## Example
    BatchNorm over each rank's own samples; a mask or position that one rank makes differently;
    stale weights on one rank.

    ## How to fix
    Look at the named module: what in it depends on the rank, on the local batch, or on the
    parallel plan?

    ## References
    - torch.nn.SyncBatchNorm
    """

    code = "PAR009"
    name = "output-disparity"
    severity = Severity.ERROR

    why = "Outputs for the same samples and weights do not depend on the number of ranks."
    fix = "Make the module independent of rank and local batch, or synchronise what it shares."
    fix_changes = "The outputs of the module on the ranks where they differ."
    fix_leaves = "Differences in later modules that have a cause of their own."
    disproof = "The module's outputs for the same samples agree within the bound in both runs."

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Name the first module whose output differs."""
        if event.subject is not Subject.OUTPUT:
            return
        where = f" on {event.culprits.phrase()}" if event.culprits else ""
        first = event.differences[0]
        message = (
            f"at step {event.step} the output of {subjects_of(event)[0]} differs between "
            f"{event.candidate}{where} and {event.reference} for the same samples: {figures(first)}"
        )
        yield self.finding(
            message + reason(event),
            ranks=event.culprits,
            step=event.step,
            subjects=subjects_of(event),
            evidence=evidence_of(event),
            grade=Grade.NOTE if event.is_doubtful else Grade.PROVEN,
        )
