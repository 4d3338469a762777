"""PAR008: runs on different numbers of ranks begin with different weights."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, figures, how_many, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Severity


class StartDisparity(Check[Divergence]):
    """Runs on different numbers of ranks begin with different weights.

    ## What it detects
    Before the first step a parameter of the run on N ranks is not what it is in the run on one
    rank.

    ## Why it matters
    The runs are two experiments: every later difference follows from it.

    ## Example
    `torch.manual_seed(rank)` before a model is built that is sharded afterwards.

    ## How to fix
    Build the model with one seed on all ranks, or load one checkpoint; set rank-dependent seeds
    after that.

    ## References
    - torch.distributed.fsdp.fully_shard
    """

    code = "PAR008"
    name = "start-disparity"
    severity = Severity.ERROR

    why = "What a sharded parameter begins with is made of the parts that each rank drew by itself."
    fix = "Build or load the model alike on all ranks before it is sharded."
    fix_changes = "The weights that training begins with."
    fix_leaves = "Randomness that comes later, such as dropout."
    disproof = "The parameters of both runs are bitwise the same before the first step."

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Name the parameters that begin unlike."""
        if event.subject is not Subject.START:
            return
        message = (
            f"{event.candidate} begins with other weights than {event.reference}: "
            f"{how_many(event)} of {event.num_compared} parameters; {figures(event.differences[0])}"
        )
        yield self.finding(
            message,
            ranks=event.culprits,
            step=event.step,
            subjects=subjects_of(event),
            evidence=evidence_of(event),
        )
