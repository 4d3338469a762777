"""SHD001: an optimizer holds the parameters that a model had before it was sharded."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.alignment import OptimizerView


class OptimizerBeforeSharding(Check[OptimizerView]):
    """An optimizer holds the parameters that a model had before it was sharded.

    ## What it detects
    An optimizer that is about to step holds parameters that belong to no model and have no
    gradient, while parameters of a model have gradients and belong to no optimizer.

    ## Why it matters
    Sharding, flattening or moving replaces parameters. The optimizer goes on with the old ones:
    training runs, gradients look right, and the weights never change.

    ## Example
    `optimizer = AdamW(model.parameters())` before `fully_shard(model)`.

    ## How to fix
    Make the optimizer of the parameters of the wrapped model.

    ## References
    - pytorch/pytorch#107843
    """

    code = "SHD001"
    name = "optimizer-before-sharding"
    severity = Severity.ERROR

    why = "An optimizer refers to the parameter objects that it was given, not to their names."
    fix = "Create the optimizer after the model was wrapped, from `model.parameters()`."
    fix_changes = "The weights begin to change: the learning rate takes effect."
    fix_leaves = "Checkpoints of the optimizer that were written meanwhile: they hold no history."
    disproof = "The parameters named here differ before and after the step."

    def check(self, alignment: OptimizerView) -> Iterator[Finding]:
        """Name what the optimizer should hold instead."""
        stale = {rank: state for rank, state in alignment.by_rank.items() if state.replaced}
        if not stale:
            return
        ranks = RankSet(stale)
        first = stale[min(stale)]
        location = user_location(first.site.frames)
        yield self.finding(
            f"{first.optimizer} holds {first.num_foreign} parameters that no model has any more; "
            f"{first_and_more(first.replaced)} have gradients and no optimizer",
            ranks=ranks,
            step=first.step,
            location=location,
            subjects=first.replaced,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"of {first.num_parameters} parameters of {first.optimizer} "
                    f"{first.num_foreign} belong to no model and have no gradient",
                    location=location,
                ),
            ),
        )
