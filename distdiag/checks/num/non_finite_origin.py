"""NUM001: the first NaN or infinity of a training, where and on which rank it is made."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.num.places import (
    place_phrase,
    subject_of,
    value_phrase,
    what_came_of,
)
from distdiag.events.numerics import NonFinite, Stage
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.numerics import NonFiniteView, first_place

_COMBINED = ("gradient", "update")
_MOST_PLACES = 3
_HELD = (
    "The tensor held it before the model computed anything. Look at where it was written last: by "
    "a checkpoint that holds such a number, by an earlier step, or by nobody (`torch.empty`, "
    "`to_empty` without an initialisation)."
)
_FIXES: dict[Stage, str] = {
    "input": "Check where the named rank reads and prepares the batch of this step: a file with "
    "NaN, a normalisation that divides by a deviation of zero, an empty sample. The model is not "
    "the cause: its input already contains the NaN or infinity.",
    "parameter": _HELD,
    "buffer": _HELD,
}
"""What to do where a number did not come out of the computation of a module."""


class NonFiniteOrigin(Check[NonFiniteView]):
    """A NaN or infinity is made, and reaches the loss or the gradients.

    ## What you see
    The loss becomes NaN on all ranks, often some steps after the first NaN. A collective spreads
    the NaN of one rank to the others, and the optimizer writes it into all parameters.

    ## Example
        attention = scores / mask.sum(-1)                   # wrong: 0 / 0 for an empty row
        attention = scores / mask.sum(-1).clamp(min=1)      # right

    ## How to fix
    Correct the operation at the place that the finding names: its inputs were finite and its result
    is not. Common causes are a division by zero, the logarithm or root of zero, an overflow of a
    16-bit type, and memory from `torch.empty` that was never filled.

    Changes: The training continues with finite numbers.

    Leaves: Parameters that are NaN already: load a checkpoint from before the step.

    ## When it is not a defect
    The program notices such steps by itself and leaves them out on all ranks; the finding is a note
    then. Silence it by `ignore = ["NUM001"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
    - https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
    """

    code = "NUM001"
    name = "non-finite-origin"
    severity = Severity.ERROR

    def check(self, view: NonFiniteView) -> Iterator[Finding]:
        """Name where it began, and what other ranks met in consequence."""
        if not view.by_rank:
            return
        culprits = view.culprits
        event = view.by_rank[min(culprits)]
        place = first_place(event)
        word = value_phrase(place)
        what, comma, when = place_phrase(place).partition(", ")
        where = f"{what} on {culprits.phrase()}{comma}{when}"
        message = f"the first {word} of step {view.step} is {where}"
        if place.stage in _COMBINED and len(view.by_rank) > 1:
            message += "; what each rank gave to it was not read"
        if not event.are_modules_read:
            message += "; modules were not read in this step, to save time ([numerics] cost_share)"
        if not view.is_harmful:
            message += f"; {what_came_of(event)}"
        yield self.finding(
            message,
            ranks=culprits,
            step=view.step,
            location=user_location(event.site.frames),
            subjects=(subject_of(place),),
            evidence=tuple(
                Evidence(ranks=RankSet([rank]), summary=_met(each, rank in culprits))
                for rank, each in sorted(view.by_rank.items())
            ),
            grade=Grade.PROVEN if view.is_harmful else Grade.NOTE,
            fix=_FIXES.get(place.stage, self.fix),
        )


def _met(event: NonFinite, is_first: bool) -> str:
    places = [place_phrase(each) for each in event.places[:_MOST_PLACES]]
    more = event.num_places - len(places)
    text = "met it " + ("first in " if is_first else "later: ") + "; then in ".join(places)
    text += f" and {more} more places" if more > 0 else ""
    if event.infinite:
        text += f" (minus infinity, as in masks, in {place_phrase(event.infinite[0])})"
    came = what_came_of(event)
    return f"{text}; {came}" if came else text
