"""SHD006: ranks scale the gradients of one model by different factors."""

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

    ## What you see
    Each shard of the model is clipped by another coefficient, because each rank computed the norm
    of its own shards. The direction of the update is wrong and depends on the number of ranks.

    ## Example
        grads = [p.grad.to_local() for p in model.parameters()]
        # wrong: the norm of this rank's shards
        norm = torch.stack([g.norm() for g in grads]).norm()
        torch._foreach_mul_(grads, min(1.0, 1.0 / norm))
        # right
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    ## How to fix
    Use `torch.nn.utils.clip_grad_norm_` on the sharded parameters, or sum the squared norms over
    all ranks that hold shards before the coefficient is computed.

    Changes: The size of the clipped gradient, and so the effective learning rate.

    Leaves: The threshold: a global norm is larger than a local one.

    ## When it is not a defect
    All ranks multiply their gradients by the same coefficient; print it on each of them.

    If so, add `ignore = ["SHD006"]` to `distdiag.toml`.

    ## References
    - https://github.com/baidu-baige/LoongForge/issues/152
    """

    code = "SHD006"
    name = "unequal-gradient-scaling"
    severity = Severity.ERROR

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
