"""NUM020: a gradient scaler skips a step on some ranks only."""

from collections.abc import Iterator
from math import isnan

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.updates import ScalerStep
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.updates import ScalerView


class UnevenSkip(Check[ScalerView]):
    """A gradient scaler skips a step on some ranks, and others take it.

    ## What you see
    From this step on the ranks hold different weights and loss scales, or the job hangs. A gradient
    scaler skips the step on the ranks with an infinite gradient, and the other ranks step and make
    calls that the skipping ranks do not make.

    ## Example
        scaler = GradScaler("cuda")            # wrong where gradients are sharded: each rank
        scaler.step(sharded_optimizer)         # looks for inf in its own shards

        scaler = ShardedGradScaler()           # right: the ranks agree
        scaler.step(sharded_optimizer)

    ## How to fix
    Use `ShardedGradScaler` (from `torch.distributed.fsdp.sharded_grad_scaler`), which shares
    `found_inf` over the ranks. Or all-reduce `found_inf` with `dist.ReduceOp.MAX` before the step.
    Count iterations, not the steps taken.

    Changes: All ranks skip a step that one of them must skip.

    Leaves: Steps whose gradients are finite on all ranks.

    ## When it is not a defect
    Each rank is intended to train its own model.

    If so, add `ignore = ["NUM020"]` to `distdiag.toml`.

    ## References
    - https://github.com/facebookresearch/fairscale/issues/181
    - https://github.com/pytorch/pytorch/issues/115710
    """

    code = "NUM020"
    name = "uneven-skip"
    severity = Severity.ERROR

    def check(self, view: ScalerView) -> Iterator[Finding]:
        """Report one call on which the ranks do not agree; nobody knows who is right."""
        skipping = RankSet(step.rank for step in view.skipping())
        stepping = RankSet(view.by_rank) - skipping
        first = view.by_rank[min(skipping)]
        location = user_location(first.site.frames)
        yield self.finding(
            f"{first.scaler} skips the step of {first.optimizer} on {skipping.phrase()} and takes "
            f"it on {RankSet(stepping).phrase()}",
            ranks=RankSet(view.by_rank),
            step=first.step,
            location=location,
            subjects=(f"{first.scaler} of {first.optimizer}",),
            grade=Grade.LIKELY if view.are_together else Grade.NOTE,
            confidence=0.95,
            evidence=(
                _evidence(first, skipping, "found a gradient that is infinite or NaN, and skipped"),
                _evidence(view.by_rank[min(stepping)], RankSet(stepping), "stepped"),
            ),
        )


def _evidence(step: ScalerStep, ranks: RankSet, what: str) -> Evidence:
    scale = "" if isnan(step.scale) else f" at a scale of {step.scale:g}"
    return Evidence(
        ranks=ranks,
        summary=f"call {step.number} of the scaler: {what}{scale}",
        location=user_location(step.site.frames),
    )
