"""NUM030: a term of the loss gives no gradient at all, pass after pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.logged_names import is_loss_term, named, spread_of
from distdiag.events.logged import LossNumbers, LossTerm
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import LoggedView, LossView

LEAST_PASSES: Final = 48
"""A term that has a mask of its own is switched on within the first few dozen steps, if at all; one
that is to start later is multiplied by a number that is zero, which is known."""
LEAST_LOGGED: Final = 100
"""A logged zero does not say whether it is meant: so many of them are a note."""


class ZeroLossTerm(Check[LossView | LoggedView]):
    """A term of the loss gives no gradient at all, pass after pass.

    ## What you see
    The loss falls, but the model never learns what this term should teach. The gradient of the term
    is exactly zero: its mask lets nothing through, or all of its weights or advantages are zero.

    ## Example
        mask = labels == PAD                                     # wrong: nothing else is kept
        loss = ce + 0.1 * (aux * mask).sum() / mask.sum().clamp(min=1)
        mask = labels != PAD                                     # right
        loss = ce + 0.1 * (aux * mask).sum() / mask.sum()

    ## How to fix
    Print the mask or the weights of the term at one step, and correct the code that makes them all
    zero.

    Changes: The term trains the model from now on.

    Leaves: The other terms, and their weights.

    ## When it is not a defect
    The mask of the term is intended to switch it on later. Multiply the term by a number that is
    0.0 until then, or say so with `ignore = ["NUM030"]` in the configuration.

    ## References
    - https://github.com/modelscope/ms-swift/issues/5890
    """

    code = "NUM030"
    name = "zero-loss-term"
    severity = Severity.WARNING

    def check(self, view: LossView | LoggedView) -> Iterator[Finding]:
        """Look at the gradients of terms, or at what is logged of them."""
        if isinstance(view, LoggedView):
            yield from self._logged(view)
            return
        whole = {rank: same_terms(passes) for rank, passes in view.by_rank.items()}
        known = {rank: passes for rank, passes in whole.items() if len(passes) >= LEAST_PASSES}
        if not known:
            return
        for index in range(max(len(passes[0].terms) for passes in known.values())):
            zero = {r: p for r, p in known.items() if _is_zero(p, index)}
            if zero:
                yield self._finding(view, index, zero, is_everywhere=len(zero) == len(whole))

    def _finding(
        self,
        view: LossView,
        index: int,
        zero: Mapping[int, Sequence[LossNumbers]],
        *,
        is_everywhere: bool,
    ) -> Finding:
        ranks, passes = RankSet(zero), zero[min(zero)]
        term, num_terms = passes[-1].terms[index], len(passes[-1].terms)
        are_alike = any(spread_of(view.logged.get(rank, {})) == 0 for rank in zero)
        what = "the loss" if num_terms == 1 else f"term {index + 1} of {num_terms} of the loss"
        share = f", and its mask or weights keep {term.mask_share:.0%}" * (term.mask_share >= 0)
        return self.finding(
            f"{what} ({describe(term)}) gave a gradient of exactly zero in all {len(passes)} "
            f"sampled passes{share}",
            ranks=ranks,
            step=passes[-1].step,
            location=user_location(view.site.frames),
            grade=Grade.LIKELY if is_everywhere and not are_alike else Grade.NOTE,
            confidence=0.85,
            subjects=(f"term {index + 1}",),
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"steps {passes[0].step} to {passes[-1].step}: the largest gradient of "
                    f"the term was 0, the loss was {passes[-1].loss:g}",
                    values={"factor": term.factor, "mask_share": term.mask_share},
                ),
            ),
        )

    def _logged(self, view: LoggedView) -> Iterator[Finding]:
        found: dict[str, list[int]] = {}
        for rank, series in view.by_rank.items():
            terms = named(series, is_loss_term)
            is_trained = any(value != 0 for each in terms for value in each.values)
            for each in terms if is_trained else ():
                if len(each.points) >= LEAST_LOGGED and not any(each.values):
                    found.setdefault(each.name, []).append(rank)
        for name, ranks in found.items():
            one = view.by_rank[ranks[0]][name]
            yield self.finding(
                f"{name} is exactly 0 in all {len(one.points)} values that were logged",
                ranks=RankSet(ranks),
                location=user_location(one.site.frames),
                subjects=(name,),
                grade=Grade.NOTE,
                confidence=0.5,
                evidence=f"{one.logger} was given 0 from the first value to the last",
            )


def describe(term: LossTerm) -> str:
    """Return how a term is made: ``Sum of Mul``, times what it is multiplied by."""
    made = " of ".join(term.operations.split()[:3]) or "one number"
    is_plain = math.isnan(term.factor) or math.isclose(abs(term.factor), 1.0)
    return made if is_plain else f"{abs(term.factor):g} times {made}"


def same_terms(passes: Sequence[LossNumbers]) -> list[LossNumbers]:
    """Return those passes whose loss has the terms of the last one."""
    if not passes:
        return []
    last = [term.operations for term in passes[-1].terms]
    return [p for p in passes if [term.operations for term in p.terms] == last and last]


def _is_zero(passes: Sequence[LossNumbers], index: int) -> bool:
    terms = [p.terms[index] for p in passes if index < len(p.terms)]
    return bool(terms) and all(term.gradient == 0 and term.factor != 0 for term in terms)
