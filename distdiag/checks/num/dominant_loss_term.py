"""NUM031: one term of the loss is far larger than another."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.logged_names import is_loss_term, named
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.logged import LoggedSeries, LoggedView

LEAST_LOGGED: Final = 50
"""The terms of a loss may be far apart until the first of them has been learnt."""


class DominantLossTerm(Check[LoggedView]):
    """One term of the loss is far larger than another.

    ## What you see
    The model does not learn what the smaller term of the loss should teach: this term changes the
    loss by less than a percent. The other term is far larger.

    ## Example
        loss = mse_in_pixels + kl             # 1e4 and 1: only the first is trained
        loss = mse_in_pixels / 1e4 + kl       # comparable

    ## How to fix
    Multiply the terms by weights that make them comparable (`loss = main + 0.1 * other`), and log
    each term after the multiplication.

    Changes: The direction in which the model is trained.

    Leaves: The terms themselves.

    ## When it is not a defect
    The terms are logged before they are multiplied by their weights. `component_dominance` in
    `[numerics]` sets the threshold.

    ## References
    - https://arxiv.org/abs/1705.07115
    """

    code = "NUM031"
    name = "dominant-loss-term"
    severity = Severity.WARNING

    def check(self, view: LoggedView) -> Iterator[Finding]:
        """Compare the middle of the last values of the terms that one rank logs together."""
        for rank, series in sorted(view.by_rank.items()):
            terms = [t for t in named(series, is_loss_term) if len(t.points) >= LEAST_LOGGED]
            by_place: dict[object, list[tuple[float, LoggedSeries]]] = {}
            for term in terms:
                size = median(map(abs, term.values[-LEAST_LOGGED:]))
                if size > 0:
                    by_place.setdefault(term.site.location, []).append((size, term))
            for sizes in by_place.values():
                least, most = min(sizes, key=_size), max(sizes, key=_size)
                if least[0] * view.thresholds.component_dominance < most[0]:
                    yield self._finding(rank, least, most)
            if terms:
                return  # the other ranks log the same

    def _finding(
        self, rank: int, least: tuple[float, LoggedSeries], most: tuple[float, LoggedSeries]
    ) -> Finding:
        return self.finding(
            f"{most[1].name} is {most[0] / least[0]:.0f} times as large as {least[1].name}",
            ranks=RankSet([rank]),
            location=user_location(most[1].site.frames),
            subjects=(least[1].name,),
            grade=Grade.NOTE,
            confidence=0.5,
            evidence=f"medians of the last {LEAST_LOGGED} values: {most[0]:g} and {least[0]:g}",
        )


def _size(term: tuple[float, LoggedSeries]) -> float:
    return term[0]
