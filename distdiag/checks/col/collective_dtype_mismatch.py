"""COL004: ranks call one collective with different dtypes."""

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
from distdiag.findings.descriptions import call_phrase, sizes_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class CollectiveDtypeMismatch(Check[CollectiveView]):
    """Ranks call one collective with different dtypes.

    ## What it detects
    The same collective of a process group, or a send and its receive, with as many elements on
    every rank but of different dtypes.

    ## Why it matters
    Bytes are exchanged, not numbers. If the widths differ the call hangs or overruns memory; if
    they agree (float16 and bfloat16) it ends well and every value is wrong.

    ## Example
    One rank computes its loss outside of autocast: it reduces float32 where the others reduce
    bfloat16.

    ## How to fix
    Convert to one dtype right before the call, on every rank.

    ## References
    - `torch.distributed.flight_recorder`: `COLLECTIVE_DTYPE_MISMATCH`
    """

    code = "COL004"
    name = "collective-dtype-mismatch"
    severity = Severity.ERROR

    why = "A backend exchanges bytes and takes each rank's own dtype for what they mean."
    fix = "Convert the tensor to one agreed dtype right before the call, on every rank."
    fix_changes = "The precision of what is exchanged, on the ranks that convert."
    fix_leaves = "The reason why the dtypes differ: a cast, autocast or checkpoint of some ranks."
    disproof = "The recorded dtypes of this call are the same on all ranks."

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the dtypes that they passed."""
        if alignment.kind == "group" or unexplained(alignment) is not Aspect.DTYPE:
            return
        camps = group_by(alignment, lambda call: frozenset(call.signature.dtypes))
        verdict = blame(alignment, camps)
        what = ", ".join(
            f"{'/'.join(dict.fromkeys(alignment.by_rank[min(camp)].signature.dtypes))} "
            f"on {camp.phrase()}"
            for camp in camps
        )
        yield self.finding(
            f"{call_phrase(alignment.any_event)} is called with different dtypes: {what}",
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            grade=grade_of(alignment, verdict),
            confidence=verdict.confidence,
            evidence=camp_evidence(alignment, camps, sizes_phrase),
        )
