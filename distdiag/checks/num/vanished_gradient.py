"""NUM015: all gradients of an optimizer are zero, or too small to change anything."""

from collections.abc import Iterator, Sequence

from distdiag.checks.base import Check
from distdiag.checks.num.gradient_norms import total_norms
from distdiag.events.updates import OptimizerUpdate
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.updates import NUM_LOOKS, UpdateView


class VanishedGradient(Check[UpdateView]):
    """All gradients of an optimizer are zero on all ranks, or too small to change anything.

    ## What you see
    The loss stands still, or only follows weight decay. The optimizer gets gradients that are zero,
    for example because the loss is multiplied by an empty mask or by advantages that are all zero.

    ## Example
        loss = (losses * mask).sum() / mask.sum().clamp(min=1)   # wrong where mask is all zero
        assert mask.any(), "no token of this batch is trained on"  # right: find out why

    ## How to fix
    Print the factors of the loss (masks, advantages, coefficients) and the labels at one step, and
    correct the factor that is zero. Labels that are all equal to `ignore_index` have the same
    effect.

    Changes: The weights begin to move.

    Leaves: The model and its optimizer.

    ## When it is not a defect
    The loss has reached its minimum. It is a warning only if the gradients were so from the first
    step on.

    If so, add `ignore = ["NUM015"]` to `distdiag.toml`, or set `smallest_gradient_norm`.

    ## References
    - https://github.com/modelscope/ms-swift/issues/5890
    """

    code = "NUM015"
    name = "vanished-gradient"
    severity = Severity.WARNING

    def check(self, view: UpdateView) -> Iterator[Finding]:
        """Judge the norm of all gradients at the last looked-at steps."""
        least = view.numerics.smallest_gradient_norm
        norms = total_norms(view)
        last = norms[-NUM_LOOKS:]
        if len(last) < NUM_LOOKS or not all(norm < least for _, norm in last):
            return
        was_always = all(norm < least for _, norm in norms)
        has_rate = all(look.rate > 0 for look, _ in last)
        look, norm = last[0]
        steps = ", ".join(str(each.step) for each, _ in last)
        is_zero = all(value == 0.0 for _, value in last)
        yield self.finding(
            f"all gradients of {view.title} are {'zero' if is_zero else 'nearly zero'} on "
            f"{view.ranks.phrase()} at steps {steps}",
            ranks=view.ranks,
            step=look.step,
            location=user_location(look.site.frames),
            subjects=(view.title,),
            grade=Grade.LIKELY if was_always and has_rate else Grade.NOTE,
            confidence=0.85,
            evidence=f"the norm of all gradients is {norm:.2g}, less than {least:.2g}"
            + _since(norms, least),
        )


def _since(norms: Sequence[tuple[OptimizerUpdate, float]], least: float) -> str:
    """Say when gradients were last larger, after which there is nothing wrong with small ones."""
    for look, norm in reversed(norms):
        if norm >= least:
            was = f"; it was {norm:.2g} at step {look.step}"
            return f"{was}, so the loss may have reached its minimum since then"
    return ""
