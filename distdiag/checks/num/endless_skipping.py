"""NUM021: a gradient scaler skips all steps."""

from collections.abc import Iterator
from math import isnan
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.updates import SkippingView

_MOST_SKIPPED: Final = 32
"""A scale of 2^16, with which a scaler begins, is halved to 2^-16 by so many: what is still
infinite then is so without any scale."""


class EndlessSkipping(Check[SkippingView]):
    """A gradient scaler skips one step after another, however small its scale becomes.

    ## What you see
    The weights never change again, and no error says so. The gradients are infinite or NaN whatever
    the loss scale is, so the gradient scaler skips every step.

    ## Example
        loss = torch.log(probabilities)          # wrong: NaN gradients at zero, at any scale
        loss = torch.log_softmax(logits, -1)     # right: finite

    ## How to fix
    Run a few steps under `with torch.autograd.detect_anomaly():` to find the operation that makes
    the gradients NaN, and correct that operation. In addition, stop the run if the scaler has
    skipped many steps in a row.

    Changes: The weights begin to change again.

    Leaves: Single skipped steps: a scaler finds its scale by them.

    ## When it is not a defect
    The scaler began with a scale far above 65536.

    If so, add `ignore = ["NUM021"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
    """

    code = "NUM021"
    name = "endless-skipping"
    severity = Severity.WARNING

    def check(self, view: SkippingView) -> Iterator[Finding]:
        """Count the skips in a row."""
        found = {r: s for r, s in view.by_rank.items() if s.num_skipped >= _MOST_SKIPPED}
        if not found:
            return
        ranks = RankSet(found)
        step = found[min(found)]
        scale = "" if isnan(step.scale) else f", and its scale is {step.scale:g}"
        yield self.finding(
            f"{step.scaler} has skipped {step.num_skipped} steps of {step.optimizer} in a row"
            f"{scale}",
            ranks=ranks,
            step=step.step,
            location=user_location(step.site.frames),
            subjects=(f"{step.scaler} of {step.optimizer}",),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=f"{step.num_stepped} steps were taken before",
        )
