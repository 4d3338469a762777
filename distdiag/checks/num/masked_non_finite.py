"""NUM002: NaN is made in a forward pass, and an operation hides it from the loss."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.num.places import place_phrase, subject_of, value_phrase
from distdiag.events.numerics import NonFinite
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.numerics import MaskedView, first_place


class MaskedNonFinite(Check[MaskedView]):
    """NaN is made in a forward pass, and the loss does not show it.

    ## What you see
    You see nothing: the loss stays finite. But the forward pass makes a NaN, an operation like
    `nan_to_num` replaces it, and the part of the model that made it learns nothing from these
    elements.

    ## Example
        weights = torch.nan_to_num(rate / count)       # wrong: 0 / 0 is hidden
        weights = rate / count.clamp(min=1)            # right: it is not made

    ## How to fix
    Prevent the NaN before it is made: clamp or mask the input of the division, root or logarithm
    (`torch.where(mask, x, 1.0)`). Then remove the operation that hides the NaN.

    Changes: These elements take part in the training, or are left out on purpose.

    Leaves: NaN that is hidden in other places.

    ## When it is not a defect
    The elements belong to padding, and nothing reads them: then it is a note. Silence it by
    `ignore = ["NUM002"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nan_to_num.html
    """

    code = "NUM002"
    name = "masked-non-finite"
    severity = Severity.WARNING

    def check(self, view: MaskedView) -> Iterator[Finding]:
        """Name the first place, and what hides it if the graph shows that."""
        found = {rank: e for rank, e in view.by_rank.items() if first_place(e).value == "nan"}
        if not found:
            return  # infinity is what masks and scores of what is left out are
        hidden = {rank: e for rank, e in found.items() if first_place(e).hidden_by}
        told = hidden or found
        first = min(told.values(), key=lambda each: (each.step, each.rank))
        place = first_place(first)
        how = f"{place.hidden_by} hides it" if hidden else "nothing shows it"
        yield self.finding(
            f"{place_phrase(place)}, is {value_phrase(place)} at step {first.step}, and the loss "
            f"is finite: {how}",
            ranks=RankSet(told),
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(subject_of(place),),
            evidence=tuple(
                Evidence(ranks=RankSet([rank]), summary=_seen(each))
                for rank, each in sorted(told.items())
            ),
            grade=Grade.LIKELY if hidden else Grade.NOTE,
            confidence=0.8,
        )


def _seen(event: NonFinite) -> str:
    return f"{event.num_places} places held it at step {event.step}, the gradients none"
