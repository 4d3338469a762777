"""NUM033: a divergence is exactly zero although its policy is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.num.logged_names import is_kl, is_kl_coefficient, named
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import LoggedSeries, LoggedView, SeriesByName

LEAST_UPDATES: Final = 20
"""The first updates of a warm-up are so small that half precision may not show them."""


class ZeroKl(Check[LoggedView]):
    """A divergence is exactly zero although its policy is trained.

    ## What you see
    Nothing holds the policy near its reference: the logged KL stays at 0.0 after updates, with a
    coefficient above zero. The policy is compared with itself, or is not trained at all.

    ## Example
        reference = policy                      # wrong: the same parameters
        reference = copy.deepcopy(policy).eval().requires_grad_(False)   # right

    ## How to fix
    Copy the reference before training: `reference = copy.deepcopy(policy).requires_grad_(False)`.
    If it is a copy already and still equal to the policy after some updates, find out why the
    policy does not change.

    Changes: The penalty acts from now on.

    Leaves: The rewards and how they are computed.

    ## When it is not a defect
    What is logged is the divergence from the policy that has sampled the batch, which one update
    for each batch leaves at zero. Call it `approx_kl`, or say so with `ignore = ["NUM033"]`.

    ## References
    - https://github.com/modelscope/ms-swift/issues/5890
    """

    code = "NUM033"
    name = "zero-kl"
    severity = Severity.WARNING

    def check(self, view: LoggedView) -> Iterator[Finding]:
        """Look at each divergence that is logged, and at what it is multiplied by."""
        found: dict[str, list[int]] = {}
        for rank, series in view.by_rank.items():
            for each in named(series, is_kl):
                if _is_zero(each) and coefficient_of(series) != 0:
                    found.setdefault(each.name, []).append(rank)
        for name, ranks in found.items():
            series = view.by_rank[ranks[0]]
            one, coefficient = series[name], coefficient_of(series)
            num = len(one.after(0))
            weight = "" if coefficient is None else f", with a coefficient of {coefficient:g}"
            yield self.finding(
                f"{name} is exactly 0 in all {num} values that were logged after updates{weight}",
                ranks=RankSet(ranks),
                step=one.points[-1][0],
                location=user_location(one.site.frames),
                subjects=(name,),
                grade=Grade.NOTE if coefficient is None else Grade.LIKELY,
                confidence=0.5 if coefficient is None else 0.85,
                evidence=(
                    Evidence(
                        ranks=RankSet(ranks),
                        summary=f"{one.logger} was given {name} {len(one.points)} times while "
                        f"optimizers stepped {one.num_updates} times",
                        values={"coefficient": coefficient},
                    ),
                ),
            )


def _is_zero(series: LoggedSeries) -> bool:
    after = series.after(0)
    return len(after) >= LEAST_UPDATES <= series.num_updates and not any(series.values)


def coefficient_of(series: SeriesByName) -> float | None:
    """Return the least of the last coefficients that are logged, None if none is."""
    known = [each.values[-LEAST_UPDATES:] for each in named(series, is_kl_coefficient)]
    return min((min(values) for values in known if values), default=None)
