"""SHD006: ranks scale the gradients of one model by different factors."""

from collections.abc import Collection, Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import location_on
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.contributions import ALIKE
from distdiag.views.gradients import StageScalings
from distdiag.views.models import ScalingView

_TOLERANCE: Final = 0.05
_FEWEST_STEPS: Final = 2
"""In a single step a stage may have been treated otherwise for a reason of its own."""


def differ(factors: Collection[float], tolerance: float = _TOLERANCE) -> bool:
    """Say whether they are not the same but for rounding and what is estimated."""
    low, high = min(factors), max(factors)
    return high - low > tolerance * max(abs(low), abs(high))


def clipped_apart(view: StageScalings) -> tuple[int, ...]:
    """Return the steps in which stages scale differently, if any of them clips.

    A factor that is the same in all steps clips nothing: it may belong to the stage.
    """
    steps = tuple(step for step, by_rank in view.factors.items() if differ(by_rank.values(), ALIKE))
    if len(steps) < _FEWEST_STEPS:
        return ()
    by_rank = [[each[rank] for each in view.factors.values()] for rank in view.ranks]
    return steps if any(map(differ, by_rank)) else ()


class UnequalGradientScaling(Check[ScalingView | StageScalings]):
    """Ranks scale the gradients of one model by different factors.

    ## What you see
    The direction of the update is wrong and depends on the number of ranks. Each shard of the model
    is clipped by a different coefficient, because each rank computed the norm of its own shards
    only.

    ## Example
        grads = [p.grad.to_local() for p in model.parameters()]
        # wrong: the norm of this rank's shards
        norm = torch.stack([g.norm() for g in grads]).norm()
        torch._foreach_mul_(grads, min(1.0, 1.0 / norm))
        # right
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    ## How to fix
    Call `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` on the sharded parameters.
    Or sum the squared norms over all ranks that hold shards (`dist.all_reduce(squared_norm)`)
    before the coefficient is computed.

    Changes: The size of the clipped gradient, and so the effective learning rate.

    Leaves: The threshold: the norm over all ranks is larger than that of one rank.

    ## When it is not a defect
    All ranks multiply their gradients by the same coefficient (print it on each rank), or each
    stage of a pipeline is intended to be clipped by itself.

    If so, add `ignore = ["SHD006"]` to `distdiag.toml`.

    ## References
    - https://github.com/baidu-baige/LoongForge/issues/152
    """

    code = "SHD006"
    name = "unequal-gradient-scaling"
    severity = Severity.ERROR

    def check(self, view: ScalingView | StageScalings) -> Iterator[Finding]:
        """Compare the factors of the ranks."""
        yield from self._stages(view) if isinstance(view, StageScalings) else self._model(view)

    def _stages(self, view: StageScalings) -> Iterator[Finding]:
        for step in clipped_apart(view)[:1]:
            ranks, by_rank = RankSet(view.ranks), view.factors[step]
            yield self.finding(
                f"{ranks.phrase()} send each other activations and their gradients, as stages of "
                f"one model, but scale their gradients by different factors before step {step}: "
                f"from {min(by_rank.values()):.4g} to {max(by_rank.values()):.4g}",
                ranks=ranks,
                step=step,
                location=user_location(view.sites[min(ranks)].frames),
                severity=Severity.WARNING,
                grade=Grade.LIKELY,
                confidence=0.8,
                evidence=tuple(_factor(rank, by_rank[rank]) for rank in ranks),
                why="Each stage is clipped by the norm of its own gradients only. The direction of "
                "the update is wrong and depends on where the model is cut.",
                fix="Sum the squared norms over all stages (`dist.all_reduce(squared_norm)`) "
                "before the coefficient is computed.",
            )

    def _model(self, view: ScalingView) -> Iterator[Finding]:
        if not differ(view.by_rank.values()):
            return
        low, high = min(view.by_rank.values()), max(view.by_rank.values())
        ranks = RankSet(view.by_rank)
        yield self.finding(
            f"{ranks.phrase()} scale the gradients of {view.model} by different factors before "
            f"step {view.step}: from {low:.4g} to {high:.4g}",
            ranks=ranks,
            step=view.step,
            location=location_on(view, ranks),
            evidence=tuple(_factor(rank, each) for rank, each in sorted(view.by_rank.items())),
        )


def _factor(rank: int, factor: float) -> Evidence:
    return Evidence(
        ranks=RankSet([rank]),
        summary=f"multiplied its gradients by {factor:.6g}",
        values={"factor": factor},
    )
