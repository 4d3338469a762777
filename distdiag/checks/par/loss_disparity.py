"""PAR010: the loss over the ranks is not the loss of the same samples on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, figures, reason, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Grade, Severity


class LossDisparity(Check[Divergence]):
    """The loss over the ranks is not the loss of the same samples on one rank.

    ## What it detects
    The outputs of the modules agree, but neither the mean nor the sum of the ranks' losses is
    the loss that one rank has for all their samples.

    ## Why it matters
    The ranks optimise another objective than one rank: some samples or tokens weigh more than
    others.

    ## Example
    The mean over each rank's own valid tokens, averaged over ranks that have different numbers
    of them.

    ## How to fix
    Sum the loss over the tokens and divide by their number over all ranks and micro-steps of
    the step (times the number of ranks if gradients are averaged).

    ## References
    - PrimeIntellect-ai/prime-rl#1961
    """

    code = "PAR010"
    name = "loss-disparity"
    severity = Severity.ERROR

    why = "A mean of means weighs each rank alike, whatever it holds."
    fix = "Normalise by the number of elements that all ranks together have in this step."
    fix_changes = "The effective learning rate of samples on ranks with few elements."
    fix_leaves = "What is logged, if that is averaged elsewhere."
    disproof = "Summed over ranks and divided by the global count, the loss is that of one rank."

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Say by how much the losses differ, and with which weights the ranks enter."""
        if event.subject is not Subject.LOSS:
            return
        message = (
            f"at step {event.step} the loss of {event.candidate} is not that of {event.reference}: "
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
