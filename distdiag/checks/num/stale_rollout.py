"""NUM034: samples come from weights that are not brought up to date."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.logged_names import is_ratio, named
from distdiag.events.logged import LossNumbers, PolicyRatio
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import LoggedView, LossView

ROUNDING: Final = 0.01
"""Log-probabilities of half precision, 2^-8, differ by so much between two ways to compute them."""
LEAST_ROLLOUTS: Final = 6
GROWTH: Final = 2.0
"""Samples that are one update old differ by as much in the first rollouts as later on; those of
weights that stay behind by ever more, until clipping holds the policy back."""
LEAST_LOGGED: Final = 30
LARGE: Final = 0.2
"""The usual range within which a policy may change in all updates from one batch."""


class StaleRollout(Check[LossView | LoggedView]):
    """Samples come from weights that are not brought up to date.

    ## What you see
    Training is unstable, because the samples come from an old policy. Before the first update from
    fresh samples the ratio of new to old probabilities should be 1, but it moves away from 1 with
    each rollout: the sampler has kept the weights of an earlier policy.

    ## Example
        engine.wake_up()                                  # wrong: it still has the old weights
        samples = engine.generate(prompts)
        engine.wake_up()                                  # right
        engine.load_weights(policy.state_dict().items())
        samples = engine.generate(prompts)

    ## How to fix
    Copy the weights of the policy into the sampler after each update, on every path (also after the
    sampler wakes up from sleep). Then compare the log-probabilities of one batch in both.

    Changes: Samples come from the policy that is trained.

    Leaves: The loss and the optimizer.

    ## When it is not a defect
    The algorithm is intended for samples of older policies. Say so with `ignore = ["NUM034"]` in
    the configuration.

    ## References
    - https://github.com/huggingface/trl/issues/5312
    """

    code = "NUM034"
    name = "stale-rollout"
    severity = Severity.WARNING

    def check(self, view: LossView | LoggedView) -> Iterator[Finding]:
        """Look at the ratios in the loss right after samples were drawn, or at logged ones."""
        if isinstance(view, LoggedView):
            yield from self._logged(view)
            return
        stale = {r: f for r, passes in view.by_rank.items() if is_stale(f := _fresh(passes))}
        if not stale:
            return
        ranks, fresh = RankSet(stale), stale[min(stale)]
        yield self.finding(
            "the policy ratio should be 1 before the first update from fresh samples: it is off by "
            f"{fresh[-1][1].deviation:.3f} on average at step {fresh[-1][0]}, and was by "
            f"{fresh[0][1].deviation:.3f} at step {fresh[0][0]}",
            ranks=ranks,
            step=next(step for step, ratio in fresh if ratio.deviation > ROUNDING),
            location=user_location(view.site.frames),
            subjects=("ratio",),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"{len(fresh)} rollouts: mean difference from 1 of "
                    + ", ".join(f"{ratio.deviation:.3g}" for _, ratio in fresh[-8:]),
                ),
            ),
        )

    def _logged(self, view: LoggedView) -> Iterator[Finding]:
        for name in sorted(
            {s.name for each in view.by_rank.values() for s in named(each, is_ratio)}
        ):
            drifted = [r for r, each in view.by_rank.items() if name in each]
            drifted = [r for r in drifted if has_drifted(view.by_rank[r][name].values)]
            if not drifted:
                continue
            one = view.by_rank[drifted[0]][name]
            third = len(one.points) // 3
            yield self.finding(
                f"{name} began at {one.values[0]:.3f} and is {fmean(one.values[-third:]):.3f} on "
                "average by now; it should stay near 1",
                ranks=RankSet(drifted),
                step=one.points[-1][0],
                location=user_location(one.site.frames),
                subjects=(name,),
                grade=Grade.LIKELY,
                confidence=0.7,
                evidence=f"{one.logger} was given {len(one.points)} values, the last of them "
                + ", ".join(f"{value:.3g}" for value in one.values[-5:]),
            )


Fresh = Sequence[tuple[int, PolicyRatio]]


def _fresh(passes: Sequence[LossNumbers]) -> Fresh:
    return [(p.step, p.ratio) for p in passes if p.ratio is not None and p.ratio.has_sampled]


def is_stale(fresh: Fresh) -> bool:
    """Say whether ratios began at 1 and go ever farther from it."""
    away = [ratio.deviation for _, ratio in fresh]
    if len(away) <= LEAST_ROLLOUTS or not all(map(math.isfinite, away)) or away[0] > ROUNDING:
        return False
    third = len(away) // 3
    # A program that draws beside its rollouts, as to estimate an entropy, seems to have fresh
    # samples in each pass, and is back at 1 in the first one of each rollout.
    is_off = min(away[-max(LEAST_ROLLOUTS, len(away) // 2) :]) > ROUNDING
    return is_off and fmean(away[-third:]) > GROWTH * fmean(away[1:3])


def has_drifted(values: Sequence[float]) -> bool:
    """Say whether a mean ratio went ever farther from 1, beyond what one batch may do."""
    away = [abs(value - 1.0) for value in values]
    if len(away) < LEAST_LOGGED or not all(map(math.isfinite, away)):
        return False
    third = len(away) // 3
    parts = [fmean(away[:third]), fmean(away[third : 2 * third]), fmean(away[-third:])]
    began_right = away[0] < 2 * ROUNDING
    return began_right and parts == sorted(parts) and min(away[-third // 2 :]) > LARGE
