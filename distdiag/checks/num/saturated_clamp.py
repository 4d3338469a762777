"""NUM039: nearly all of a value lies outside of the clamp that it goes through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.logged import Clamped, LossNumbers
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.logged import LossView

OUTSIDE: Final = 0.99
LEAST_PASSES: Final = 8
"""Passes of every 16th step, so more than a hundred steps."""
LEAST_ELEMENTS: Final = 16
GUARD: Final = 1e-4
"""A smaller bound keeps a division or a logarithm finite, and is met by what is zero."""


class SaturatedClamp(Check[LossView]):
    """Nearly all of a value lies outside of the clamp that it goes through.

    ## What you see
    A value stays at the bound of a clamp in each step, and the layers that compute it are not
    trained. Elements outside of the bounds get no gradient.

    ## Example
        norm = v.norm(dim=-1).clamp(max=1.0)   # wrong: the norms are around 50
        norm = v.norm(dim=-1).clamp(max=100.0) # right

    ## How to fix
    Widen the bounds of the clamp, or scale the value into them (print it before the clamp). Or use
    a smooth function like `torch.tanh`, which lets a gradient through.

    Changes: The layers that compute the value are trained.

    Leaves: Values within the bounds.

    ## When it is not a defect
    The value is intended to stay at the bound.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.clamp.html
    """

    code = "NUM039"
    name = "saturated-clamp"
    severity = Severity.WARNING

    def check(self, view: LossView) -> Iterator[Finding]:
        """Look at the clamps of the last passes in which all near the loss were read."""
        found: dict[tuple[int, float, float], dict[int, Clamped]] = {}
        for rank, passes in view.by_rank.items():
            for index, clamp in saturated(passes):
                bounds = (clamp.least, clamp.greatest)
                least, greatest = (math.inf if math.isnan(each) else each for each in bounds)
                key = (index, least, greatest)
                found.setdefault(key, {})[rank] = clamp
        for (index, *_), by_rank in found.items():
            clamp = by_rank[min(by_rank)]
            yield self.finding(
                f"{clamp.outside:.1%} of the {clamp.num_elements} elements of a value lie outside "
                f"of {bounds_of(clamp)}, and get no gradient",
                ranks=RankSet(by_rank),
                step=view.by_rank[min(by_rank)][-1].step,
                location=user_location(view.site.frames),
                subjects=(f"clamp {index + 1}",),
                grade=Grade.LIKELY,
                confidence=0.8,
                evidence=f"so it was in the last {LEAST_PASSES} passes in which the graph of this "
                f"loss was read: more than {OUTSIDE:.0%} each time",
            )


def saturated(passes: Sequence[LossNumbers]) -> Iterator[tuple[int, Clamped]]:
    """Yield the clamps of the last pass that were saturated in those before, too."""
    last = [p.clamps for p in passes if p.clamps][-LEAST_PASSES:]
    if len(last) < LEAST_PASSES or len({len(clamps) for clamps in last}) > 1:
        return
    for index, clamp in enumerate(last[-1]):
        same = [clamps[index] for clamps in last]
        if is_meant_to_bound(clamp) and all(_is_outside(each) for each in same):
            yield index, clamp


def is_meant_to_bound(clamp: Clamped) -> bool:
    """Say whether it is neither a hinge at zero nor a guard of a division."""
    bounds = [bound for bound in (clamp.least, clamp.greatest) if not math.isnan(bound)]
    return bool(bounds) and not (len(bounds) == 1 and abs(bounds[0]) < GUARD)


def bounds_of(clamp: Clamped) -> str:
    """Return the bounds of a clamp in words."""
    if math.isnan(clamp.greatest):
        return f"the lower bound {clamp.least:g} of its clamp"
    if math.isnan(clamp.least):
        return f"the upper bound {clamp.greatest:g} of its clamp"
    return f"the bounds {clamp.least:g} and {clamp.greatest:g} of its clamp"


def _is_outside(clamp: Clamped) -> bool:
    return clamp.outside > OUTSIDE and clamp.num_elements >= LEAST_ELEMENTS
