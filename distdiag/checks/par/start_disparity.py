"""PAR008: runs on different numbers of ranks begin with different weights."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, figures, how_many, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Severity


class StartDisparity(Check[Divergence]):
    """Runs on different numbers of ranks begin with different weights.

    ## What you see
    The two runs are different experiments: every later difference follows from the first weights.
    Usually each rank draws its own part of a sharded parameter.

    ## Example
        # wrong: the parts come from different seeds
        torch.manual_seed(rank)
        fully_shard(model := build_model())
        # right
        torch.manual_seed(0)
        fully_shard(model := build_model())
        torch.manual_seed(rank)

    ## How to fix
    Build the model with one seed on all ranks or load one checkpoint, and set seeds that depend on
    the rank after that.

    Changes: The weights that training begins with.

    Leaves: Randomness that comes later, such as dropout.

    ## When it is not a defect
    The parameters of both runs are equal, bit by bit, before the first step.

    If so, add `ignore = ["PAR008"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    code = "PAR008"
    name = "start-disparity"
    severity = Severity.ERROR

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Name the parameters that begin with other values."""
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
            evidence=tuple(evidence_of(event)),
        )
