"""MOE004: a router compares scores of so few bits that many are equal."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.moe.routing import boundary_phrase, by_routers, choice_phrase, layer_names
from distdiag.events.ranks import RankSet
from distdiag.events.routing import Routing
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.routing import RoutingView

_LOW: Final = ("bfloat16", "float16", "float8")
_LEAST_SHARE: Final = 0.01


class LowPrecisionRouter(Check[RoutingView]):
    """A router compares scores of so few bits that many are equal.

    ## What you see
    A different kernel, batch size or rank chooses different experts for the same token. In this
    dtype many scores are rounded to the same number, and `topk` does not define the order of equal
    scores.

    ## Example
        # wrong: a softmax over 128 experts in bfloat16
        scores = logits.softmax(-1)
        # right
        scores = logits.float().softmax(-1)

    ## How to fix
    Compute the router's product and softmax in float32:
    `scores = torch.softmax(router(x.float()), dim=-1)` with float32 weights, outside of autocast.

    Changes: The choice for tokens whose scores were equal.

    Leaves: Scores that are nearly equal in float32 as well.

    ## When it is not a defect
    The model is defined with scores of this precision.

    If so, add `ignore = ["MOE004"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.topk.html
    """

    code = "MOE004"
    name = "low-precision-router"
    severity = Severity.INFO

    def check(self, view: RoutingView) -> Iterator[Finding]:
        """Find tokens with equal scores at the boundary."""
        tied = [each for each in by_routers(view.choices) if _is_tied(each)]
        if not tied:
            return
        worst = max(tied, key=lambda each: each.tie_share)
        ranks = RankSet(each.rank for each in tied)
        yield self.finding(
            f"{layer_names(tied)} of {view.model} chooses experts by scores of "
            f"{worst.choice.dtype}, which are equal at the boundary for up to "
            f"{worst.tie_share:.0%} of the tokens",
            ranks=ranks,
            step=worst.step,
            location=user_location(worst.site.frames),
            subjects=tuple(dict.fromkeys(each.layer for each in tied)),
            grade=Grade.NOTE,
            confidence=0.8,
            evidence=(
                Evidence(
                    ranks=RankSet([worst.rank]),
                    summary=f"step {worst.step}: {choice_phrase(worst)}; {boundary_phrase(worst)}",
                    location=user_location(worst.site.frames),
                ),
            ),
        )


def _is_tied(event: Routing) -> bool:
    return event.choice.dtype.startswith(_LOW) and event.tie_share >= _LEAST_SHARE
