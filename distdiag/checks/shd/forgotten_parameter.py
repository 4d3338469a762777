"""SHD013: trainable parameters were made after the optimizers, and none of them holds them."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import OptimizerView


class ForgottenParameter(Check[OptimizerView]):
    """Trainable parameters were made after the optimizers, and no optimizer holds them.

    ## What it detects
    Parameters that have a gradient when an optimizer steps, that no optimizer holds, and whose
    module was made after all optimizers.

    ## Why it matters
    Their gradients are computed, reduced and thrown away: the new part of the model never trains.

    ## Example
    A head that is replaced, or adapters that are injected, after `AdamW(model.parameters())`.

    ## How to fix
    Make the optimizer last, or give it the new parameters by `add_param_group`.

    ## References
    - `torch.optim.Optimizer.add_param_group`
    """

    code = "SHD013"
    name = "forgotten-parameter"
    severity = Severity.WARNING

    why = "An optimizer holds the parameters that there were when it was made."
    fix = "Build and change the model first, and make the optimizer of all its parameters then."
    fix_changes = "The new part begins to train."
    fix_leaves = "Parameters that were meant to stay as they are: set `requires_grad` to False."
    disproof = "The parameters named here are not meant to be trained."

    def check(self, alignment: OptimizerView) -> Iterator[Finding]:
        """Name the parameters."""
        # Where an optimizer holds what these have replaced, SHD001 says so.
        ranks = RankSet(
            rank
            for rank, state in alignment.by_rank.items()
            if state.forgotten and not state.replaced
        )
        if not ranks:
            return
        first = alignment.by_rank[min(ranks)]
        location = user_location(first.site.frames)
        yield self.finding(
            f"{first_and_more(first.forgotten)} have gradients and no optimizer: they were made "
            f"after {first.optimizer}",
            ranks=ranks,
            step=first.step,
            location=location,
            subjects=first.forgotten,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"{len(first.forgotten)} parameters with a gradient are in no "
                    "optimizer, and their modules are younger than all of them",
                    location=location,
                ),
            ),
        )
