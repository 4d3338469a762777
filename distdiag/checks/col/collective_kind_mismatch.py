"""COL002: ranks issue different collectives at the same point of a process group."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    Reason,
    blame,
    camp_evidence,
    grade_of,
    group_by,
    location_in,
    step_of,
)
from distdiag.checks.shared.explanations import unexplained
from distdiag.findings.descriptions import at, call_location, call_phrase, sizes_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class CollectiveKindMismatch(Check[CollectiveView]):
    """Ranks issue different collectives at the same point of a process group.

    ## What it detects
    Two ranks whose n-th collective of one process group is not the same operation, and neither a
    condition on the rank (COL009) nor a loop that ran unevenly (COL011) explains it.

    ## Why it matters
    A backend pairs calls by their order alone. Different operations hang, abort the process in C++
    or, worse, exchange memory that was never meant to meet.

    ## Example
    An optimizer returns early on the rank that has no gradient in this step, and so skips the
    `all_gather` at its end. The rank's next call, the `all_reduce` of the next backward, meets the
    `all_gather` of the others.

    ## How to fix
    Follow both lines back to the branch where the ranks part, and let every rank take the same one,
    or agree on the branch with a collective before it.

    ## References
    - `torch.distributed`: collectives must be called in the same order on every rank of a group
    - `torch.distributed.flight_recorder`: `COLLECTIVE_TYPE_MISMATCH`
    """

    code = "COL002"
    name = "collective-kind-mismatch"
    severity = Severity.ERROR

    why = (
        "The calls of a process group are paired by their order alone, so one rank has made a call "
        "too many or too few before this point, and from here on nothing fits."
    )
    fix = (
        "Find the branch or early return that only some of the ranks take before these two lines. "
        "Make every rank take the same way, or let the ranks agree on it by an all_reduce of the "
        "condition."
    )
    fix_changes = "A call that some ranks skipped now costs its time on every rank."
    fix_leaves = "Wrong sizes or values of the same calls, which would show up next."
    disproof = "The ranks' records of this group show the same operation under this number."

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the operation that they issued."""
        if alignment.kind != "collective" or unexplained(alignment) is not Aspect.OP:
            return
        camps = group_by(alignment, lambda call: call.signature.op)
        verdict = blame(alignment, camps, may_skip=True)
        calls = [alignment.by_rank[min(camp)] for camp in camps]
        what = " but ".join(
            f"{call.signature.op} on {camp.phrase()}{at(call_location(call))}"
            for camp, call in zip(camps, calls, strict=True)
        )
        skipped = ""
        if verdict.reason is Reason.SKIPPED:
            due = alignment.by_rank[min(verdict.others)]
            skipped = f"; {verdict.culprits.phrase()} went past {call_phrase(due)}"
        label = alignment.any_event.group.label
        yield self.finding(
            f"collective #{alignment.key[-1]} of group {label} is {what}{skipped}",
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            grade=grade_of(alignment, verdict),
            confidence=verdict.confidence,
            evidence=camp_evidence(
                alignment, camps, lambda call: f"{call_phrase(call)}, {sizes_phrase(call)}"
            ),
        )
