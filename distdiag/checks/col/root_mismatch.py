"""COL006: ranks name different roots for one collective."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    blame,
    camp_evidence,
    grade_of,
    group_by,
    location_in,
    step_of,
)
from distdiag.checks.shared.explanations import unexplained
from distdiag.findings.descriptions import call_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class RootMismatch(Check[CollectiveView]):
    """Ranks name different roots for one collective.

    ## What it detects
    One `broadcast`, `reduce`, `gather` or `scatter` for which the ranks gave different `src` or
    `dst` ranks (compared as global ranks).

    ## Why it matters
    Two ranks may both believe that they send, or both wait for the other: the call hangs, or a rank
    keeps a value that nobody else has.

    ## Example
    `dist.broadcast(flag, src=dist.get_rank())`: every rank names itself.

    ## How to fix
    Derive the root from something that is equal on all ranks. In a subgroup, `src` and `dst` are
    global ranks; use `group_src` and `group_dst` for a rank within the group.

    ## References
    - `torch.distributed.broadcast`, `torch.distributed.get_global_rank`
    """

    code = "COL006"
    name = "root-mismatch"
    severity = Severity.ERROR

    why = "The root sends and the others receive; with two roots nobody takes the other's part."
    fix = (
        "Compute src or dst from values that are equal on all ranks, as a global rank, or pass "
        "group_src or group_dst for a rank within the group."
    )
    fix_changes = "Which rank's value the others get."
    fix_leaves = "Values that ranks took from the wrong root before."
    disproof = "All ranks' records of this call name the same root."

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the root that they named."""
        if alignment.kind != "collective" or unexplained(alignment) is not Aspect.ROOT:
            return
        camps = group_by(alignment, lambda call: call.signature.root)
        verdict = blame(alignment, camps)
        what = ", ".join(
            f"rank {alignment.by_rank[min(camp)].signature.root} on {camp.phrase()}"
            for camp in camps
        )
        yield self.finding(
            f"{call_phrase(alignment.any_event)} has different roots: {what}",
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            grade=grade_of(alignment, verdict),
            confidence=verdict.confidence,
            evidence=camp_evidence(
                alignment, camps, lambda call: f"names rank {call.signature.root} as root"
            ),
        )
