"""PAR015: ranks that train one model give its scheduler different values of a metric."""

from collections.abc import Iterator
from math import isfinite
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.data import MetricView

_NOTHING: Final = 1e-4
"""A change that is smaller, relative to the value, `ReduceLROnPlateau` itself takes for none."""


class UnsharedMetric(Check[MetricView]):
    """Ranks that train one model give its scheduler different values of a metric.

    ## What you see
    Sooner or later the learning rates of the ranks differ, and with them the copies or shards of
    the model. Each rank gives its scheduler its own value of the metric, and lowers its rate when
    that value no longer improves.

    ## Example
        scheduler.step(val_loss)                          # wrong: each rank's own
        dist.all_reduce(val_loss, op=dist.ReduceOp.AVG)   # right: before that
        scheduler.step(val_loss)

    ## How to fix
    Reduce the metric over all ranks that train the model before the scheduler gets it:
    `dist.all_reduce(value, op=dist.ReduceOp.AVG)`, then `scheduler.step(value.item())`.

    Changes: When the learning rate falls.

    Leaves: Learning rates that differ already: load the same scheduler state on all ranks.

    ## When it is not a defect
    The program makes the learning rates equal before each step in another way.

    If so, add `ignore = ["PAR015"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html
    """

    code = "PAR015"
    name = "unshared-metric"
    severity = Severity.WARNING

    def check(self, view: MetricView) -> Iterator[Finding]:
        """Compare the values."""
        values = {rank: given.value for rank, given in view.by_rank.items()}
        finite = [value for value in values.values() if isfinite(value)]
        scale = max(map(abs, finite), default=0.0)
        if len(finite) < len(values) or max(finite) - min(finite) <= _NOTHING * scale:
            return
        first = view.by_rank[min(values)]
        shown = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in values.items())
        yield self.finding(
            f"{first.name} gets a different value on each rank that trains the model: {shown}",
            ranks=RankSet(values),
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(first.name,),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"value {given.number} is {given.value:.6g}",
                    location=user_location(given.site.frames),
                )
                for rank, given in view.by_rank.items()
            ),
        )
