"""NUM035: rewards differ, but the policy gets no gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.logged_names import is_gradient_norm, named, spread_of
from distdiag.events.logged import LossNumbers
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.logged import LoggedView, LossView

LEAST_VALUES: Final = 16
"""Groups whose answers all earn the same have no advantage: that may happen a few times in a row,
and rewards that differ exclude it."""
LEAST_PASSES: Final = 32


class ZeroPolicyGradient(Check[LossView | LoggedView]):
    """Rewards differ, but the policy gets no gradient.

    ## What you see
    The policy never changes: the norm of its gradient is exactly 0.0 although the rewards differ.
    The advantages are all zero or all equal, or the loss is detached from the policy.

    ## Example
        advantages = (rewards - rewards).unsqueeze(1)          # wrong: its own mean of one sample
        advantages = (rewards - rewards.mean()).unsqueeze(1)   # right: the mean of the group

    ## How to fix
    Print rewards, advantages and the mask of one batch on each rank, and correct the line where
    they become zero or equal. Or remove `.detach()` and `torch.no_grad()` around the
    log-probabilities of the policy.

    Changes: The policy is trained.

    Leaves: The rewards and how they are computed.

    ## When it is not a defect
    Rewards differ between groups only, so that there is nothing to prefer within any of them.

    ## References
    - https://github.com/modelscope/ms-swift/issues/5890
    """

    code = "NUM035"
    name = "zero-policy-gradient"
    severity = Severity.WARNING
    explains = ("NUM015",)

    def check(self, view: LossView | LoggedView) -> Iterator[Finding]:
        """Look at the gradient of the ratio, or at the logged norm, beside the rewards."""
        if isinstance(view, LoggedView):
            yield from self._logged(view)
            return
        zero = [rank for rank, passes in view.by_rank.items() if _gets_nothing(passes)]
        spreads = [spread_of(view.logged[rank]) for rank in zero if rank in view.logged]
        known = [spread for spread in spreads if spread is not None]
        if not zero or (known and max(known) == 0):
            return
        spread = max(known, default=None)
        rewards = "" if spread is None else f", while rewards differ by {spread:g}"
        passes = view.by_rank[zero[0]]
        yield self.finding(
            f"the ratio of the policy got a gradient of exactly zero in all {len(passes)} "
            f"sampled passes{rewards}",
            ranks=RankSet(zero),
            step=passes[-1].step,
            location=user_location(view.site.frames),
            subjects=("policy",),
            grade=Grade.NOTE if spread is None else Grade.LIKELY,
            confidence=0.5 if spread is None else 0.9,
            evidence=f"steps {passes[0].step} to {passes[-1].step}: all advantages are zero, or "
            "their mask is",
        )

    def _logged(self, view: LoggedView) -> Iterator[Finding]:
        found: dict[str, list[int]] = {}
        for rank, series in view.by_rank.items():
            for norm in named(series, is_gradient_norm):
                is_zero = len(norm.points) >= LEAST_VALUES and not any(norm.values)
                if is_zero and (spread_of(series) or 0) > 0:
                    found.setdefault(norm.name, []).append(rank)
        for name, ranks in found.items():
            one, spread = view.by_rank[ranks[0]][name], spread_of(view.by_rank[ranks[0]])
            yield self.finding(
                f"{name} is exactly 0 in all {len(one.points)} values that were logged, while "
                f"rewards differ by {spread:g}",
                ranks=RankSet(ranks),
                step=one.points[-1][0],
                location=user_location(one.site.frames),
                subjects=(name,),
                grade=Grade.LIKELY,
                confidence=0.9,
                evidence=f"{one.logger} was given a norm of 0 each time",
            )


def _gets_nothing(passes: Sequence[LossNumbers]) -> bool:
    ratios = [each.ratio for each in passes if each.ratio is not None and each.rate != 0]
    return len(ratios) >= LEAST_PASSES and all(ratio.gradient == 0 for ratio in ratios)
