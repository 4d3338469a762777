"""SHD006: ranks scale the gradients of one model by different factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import location_on
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.models import ScalingView

_TOLERANCE: Final = 0.05


class UnequalGradientScaling(Check[ScalingView]):
    """Ranks scale the gradients of one model by different factors.

    ## What it detects
    Between the last backward pass and the optimizer step each rank multiplied all its gradients by
    one factor, and the factors of ranks that keep one model together differ.

    ## Why it matters
    Clipping by a norm of the local shards, or by that of a partial value, scales each shard by
    another coefficient. The direction of the update is wrong, and it depends on the number of
    ranks.

    ## Example
    `norm = sqrt(sum(p.grad.to_local().square().sum()))` and a clip by it, without a reduction over
    the ranks.

    ## How to fix
    Use `torch.nn.utils.clip_grad_norm_` on the sharded parameters, or reduce the squared norm over
    all ranks that hold shards before the coefficient is computed.

    ## References
    - baidu-baige/LoongForge#152
    """

    code = "SHD006"
    name = "unequal-gradient-scaling"
    severity = Severity.ERROR

    why = "The norm of a sharded gradient is known to no rank alone: squares must be summed first."
    fix = "Compute the coefficient from the norm over all shards, so that it is one for all ranks."
    fix_changes = "The size of the clipped gradient, and so the effective learning rate."
    fix_leaves = "The threshold: a global norm is larger than a local one."
    disproof = "The coefficient that each rank multiplied its gradients by is the same."

    def check(self, view: ScalingView) -> Iterator[Finding]:
        """Compare the factors of the ranks."""
        low, high = min(view.by_rank.values()), max(view.by_rank.values())
        if high - low <= _TOLERANCE * max(abs(low), abs(high)):
            return
        ranks = RankSet(view.by_rank)
        yield self.finding(
            f"{ranks.phrase()} scale the gradients of {view.model} by different factors before "
            f"step {view.step}: from {low:.4g} to {high:.4g}",
            ranks=ranks,
            step=view.step,
            location=location_on(view, ranks),
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"multiplied its gradients by {factor:.6g}",
                    values={"factor": factor},
                )
                for rank, factor in sorted(view.by_rank.items())
            ),
        )
