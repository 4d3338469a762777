"""NUM043: what is clipped is not what the optimizer applies."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.updates import ClipMissed
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.updates import ClipView


class MissedClipping(Check[ClipView]):
    """Gradients are clipped while a loss scale multiplies them, or others than the optimizer's.

    ## What you see
    Clipping does not bound what the optimizer applies. While a loss scale multiplies the gradients
    their norm is far above any bound: each step is made tiny, and the logged norm is of the order
    of the scale. If the optimizer holds other tensors than were given, steps are not clipped at
    all.

    ## Example
        scaler.scale(loss).backward()
        # right: this line; wrong: without it
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)

    ## How to fix
    Call `scaler.unscale_(optimizer)` once before the gradients are clipped. Give
    `clip_grad_norm_` or `clip_grads_with_norm_` the parameters that the optimizer holds, not their
    gradients, listed after the model was wrapped.

    Changes: The size of the steps.

    Leaves: The bound itself, which may have been chosen for the wrong norm.

    ## When it is not a defect
    The bound was multiplied by the scale as well.

    If so, add `ignore = ["NUM043"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
    - https://github.com/Lightning-AI/pytorch-lightning/issues/9599
    - https://github.com/huggingface/transformers/pull/46113
    """

    code = "NUM043"
    name = "missed-clipping"
    severity = Severity.ERROR

    def check(self, view: ClipView) -> Iterator[Finding]:
        """Report what ranks have seen: the probe writes it down only where it happens."""
        seen, ranks = view.any_event, view.ranks
        location = user_location(seen.site.frames)
        step = "unscales and applies them" if seen.scaler else f"{seen.optimizer} steps"
        yield self.finding(
            _message(seen),
            ranks=ranks,
            step=seen.step,
            location=location,
            subjects=(seen.optimizer,),
            grade=Grade.LIKELY,
            confidence=0.95 if seen.scaler else 0.85,
            severity=None if seen.scaler else Severity.WARNING,
            evidence=(
                Evidence(ranks=ranks, summary="clips here", location=location),
                Evidence(
                    ranks=ranks,
                    summary=f"{step} here",
                    location=user_location(seen.step_site.frames),
                ),
            ),
        )


def _message(seen: ClipMissed) -> str:
    if seen.scaler:
        return (
            f"the gradients of {seen.optimizer} are clipped to the norm {seen.max_norm:g} while "
            f"the loss scale still multiplies them: {seen.scaler} unscales them only afterwards"
        )
    having = f"{seen.num_with_gradient} of them have" if seen.num_with_gradient else "none has"
    return (
        f"the gradients that {seen.optimizer} applies are not clipped: no optimizer holds any of "
        f"the {seen.num_given} tensors that clip_grad_norm_ is given, and {having} a gradient"
    )
