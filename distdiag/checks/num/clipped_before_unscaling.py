"""NUM022: gradients are clipped while they are still multiplied by a gradient scaler's factor."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Severity
from distdiag.views.updates import ClipView

_LEAST_SHARE: Final = 0.01
"""Programs clip to 0.01 and more, most of them to 1. Who means the scaled gradients multiplies that
by the scale, and clips to at least so much of it."""


class ClippedBeforeUnscaling(Check[ClipView]):
    """Gradients are clipped while they are still multiplied by a gradient scaler's factor.

    ## What you see
    The loss hardly falls, or falls faster as the scale falls. The limit is compared with gradients
    that are thousands of times too large, so every step is clipped, and the scaler then divides
    what is left.

    ## Example
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)     # wrong: the gradients are still scaled
        scaler.step(optimizer)

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                   # right
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)

    ## How to fix
    Call `scaler.unscale_(optimizer)` before the gradients are clipped.

    Changes: Only gradients above the limit are clipped, so most steps are much larger.

    Leaves: `scaler.step`, which does not divide a second time.

    ## When it is not a defect
    The gradients that were clipped are not those that the scaler divides in its next step.

    If so, add `ignore = ["NUM022"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
    - https://github.com/pytorch/examples/issues/1196
    """

    code = "NUM022"
    name = "clipped-before-unscaling"
    severity = Severity.WARNING

    def check(self, view: ClipView) -> Iterator[Finding]:
        """Report a limit that is not meant for scaled gradients."""
        seen = view.any_event
        if seen.limit >= _LEAST_SHARE * seen.scale:
            return
        yield self.finding(
            f"{seen.api} clips gradients of {seen.optimizer} to {seen.limit:g} while they are "
            f"still multiplied by {seen.scale:g}, so in effect to {seen.limit / seen.scale:.2g}",
            ranks=view.ranks,
            step=seen.step,
            location=user_location(seen.site.frames),
            subjects=(seen.optimizer,),
            evidence=f"the scaler stepped {seen.optimizer} next, and had not been asked to "
            "unscale its gradients before they were clipped",
        )
