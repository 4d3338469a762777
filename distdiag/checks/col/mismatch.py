"""What the checks share that compare how the ranks made one call."""

from collections.abc import Callable, Sequence
from typing import Any

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    Verdict,
    blame,
    grade_of,
    group_evidence,
    location_in,
    step_of,
)
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding
from distdiag.views.alignment import Alignment, CollectiveView


class CallMismatch(Check[CollectiveView]):
    """A check of a call that all ranks made, but not in the same way."""

    def mismatch(
        self,
        alignment: CollectiveView,
        groups: Sequence[RankSet],
        message: str,
        summary: Callable[[Collective], str],
        verdict: Verdict | None = None,
        subjects: tuple[str, ...] = (),
    ) -> Finding:
        """Build the finding on groups of ranks that disagree, with a `summary` of each."""
        verdict = verdict or blame(alignment, groups)
        return self.finding(
            message,
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            subjects=subjects,
            grade=grade_of(alignment, verdict),
            confidence=verdict.confidence,
            evidence=group_evidence(alignment, groups, summary),
        )


def each_group(
    alignment: Alignment[Any], groups: Sequence[RankSet], phrase: Callable[[Any], object]
) -> str:
    """Return ``SUM on ranks 0,2-3, MAX on rank 1``: what `phrase` says of each group's call."""
    return ", ".join(f"{phrase(alignment.by_rank[min(g)])} on {g.phrase()}" for g in groups)
