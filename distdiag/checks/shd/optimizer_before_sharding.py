"""SHD001: an optimizer holds parameters that a model had before it was sharded or copied."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import OptimizerView


class OptimizerBeforeSharding(Check[OptimizerView]):
    """An optimizer holds the parameters that a model had before it was sharded or copied.

    ## What you see
    Training runs and the gradients look right, but the weights never change. Sharding, flattening,
    moving or copying a model creates new parameters, and the optimizer still holds the old ones.

    ## Example
        # wrong
        optimizer = AdamW(model.parameters())
        fully_shard(model)
        # right
        fully_shard(model)
        optimizer = AdamW(model.parameters())

    ## How to fix
    Create the optimizer after the model is wrapped, sharded or copied, from the final model:
    `optimizer = torch.optim.AdamW(model.parameters())`.

    Changes: The weights begin to change: the learning rate takes effect.

    Leaves: Checkpoints of the optimizer that were written meanwhile: they contain no useful state.

    ## When it is not a defect
    The values of the parameters named here change in the step.

    If so, add `ignore = ["SHD001"]` to `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/107843
    """

    code = "SHD001"
    name = "optimizer-before-sharding"
    severity = Severity.ERROR

    def check(self, view: OptimizerView) -> Iterator[Finding]:
        """Name what the optimizer should hold instead."""
        yield from self._copied(view)
        stale = {rank: state for rank, state in view.by_rank.items() if state.replaced}
        if not stale:
            return
        ranks = RankSet(stale)
        first = stale[min(stale)]
        yield self.finding(
            f"{first.optimizer} holds {first.num_foreign} parameters that are no longer in any "
            f"model; {first_and_more(first.replaced)} have gradients, but no optimizer holds them",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=first.replaced,
            evidence=(
                f"of {first.num_parameters} parameters of {first.optimizer} "
                f"{first.num_foreign} belong to no model and have no gradient"
            ),
        )

    def _copied(self, view: OptimizerView) -> Iterator[Finding]:
        stale = {rank: state for rank, state in view.by_rank.items() if state.copied}
        if not stale:
            return
        ranks = RankSet(stale)
        first = stale[min(stale)]
        yield self.finding(
            f"{first.optimizer} holds {first.num_parameters} parameters that have no gradient; "
            f"{first_and_more(first.copied)} of {first.copied_model}, another copy of the same "
            f"model, have gradients, but no optimizer holds them on {ranks.phrase()}: they never "
            "change",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=first.copied,
            evidence=(
                f"at {first.num_idle} sampled steps in a row none of the parameters of "
                f"{first.optimizer} had a gradient"
            ),
        )
