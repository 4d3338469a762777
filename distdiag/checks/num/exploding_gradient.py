"""NUM016: gradients grow at each looked-at step."""

from collections.abc import Iterator
from itertools import pairwise
from math import isfinite
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.gradient_norms import total_norms
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.updates import NUM_LOOKS, UpdateView

_GROWTH: Final = 10.0
"""Three times in a row: a thousandfold, as far as from the norm to which recipes clip to
`largest_gradient_norm`."""

_OF_LARGE: Final = (
    "Gradients are large because the loss is summed over many elements and not averaged, or "
    "because the training diverges. They do not grow here."
)
_IF_SUMMED: Final = "Nothing, if the loss is a sum and falls. Else:"
"""What is said of gradients that are large and do not grow."""


class ExplodingGradient(Check[UpdateView]):
    """Gradients grow tenfold from one looked-at step to the next, or are very large.

    ## What you see
    The loss rises, and becomes inf or NaN a few steps later. The gradients are far too large for
    the learning rate.

    ## Example
        optimizer.step()                                        # wrong: as large as they come
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # right: bounded before the step
        optimizer.step()

    ## How to fix
    Clip the gradients before the step: `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`.
    Or lower the learning rate, or warm it up.

    Changes: Steps are smaller, mainly the first ones.

    Leaves: The direction of the gradients.

    ## When it is not a defect
    The loss is a sum over many tokens, and the optimizer does not depend on its scale. Gradients
    that are large and do not grow are only a note.

    If so, add `ignore = ["NUM016"]` to `distdiag.toml`, or set `largest_gradient_norm`.

    ## References
    - https://arxiv.org/abs/1211.5063
    """

    code = "NUM016"
    name = "exploding-gradient"
    severity = Severity.WARNING

    def check(self, view: UpdateView) -> Iterator[Finding]:
        """Compare the norms of all gradients at steps that follow each other."""
        most = view.numerics.largest_gradient_norm
        norms = [(look, norm) for look, norm in total_norms(view) if isfinite(norm)]
        grown = norms[-NUM_LOOKS - 1 :]
        grows = len(grown) > NUM_LOOKS and all(
            before > 0 and now >= _GROWTH * before for (_, before), (_, now) in pairwise(grown)
        )
        is_large = len(norms) >= NUM_LOOKS and all(norm > most for _, norm in norms[-NUM_LOOKS:])
        if not is_large and not (grows and norms[-1][1] > most):
            return
        shown = grown if grows else norms[-NUM_LOOKS:]
        look = shown[0][0]
        figures = ", ".join(f"{norm:.3g} at step {each.step}" for each, norm in shown)
        yield self.finding(
            f"the gradients of {view.title} {'grow' if grows else 'are large'}: norm {figures}",
            ranks=view.ranks,
            step=look.step,
            location=user_location(look.site.frames),
            subjects=(view.title,),
            grade=Grade.LIKELY if grows else Grade.NOTE,
            confidence=0.85 if grows else 0.3,
            why=self.why if grows else _OF_LARGE,
            fix=self.fix if grows else f"{_IF_SUMMED} {self.fix}",
            evidence=f"more than {most:.3g} as the optimizer finds them",
        )
