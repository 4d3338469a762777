"""COL001: some ranks never came to a collective in which the others wait."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    blame_missing,
    camp_evidence,
    is_reliable,
    location_in,
    missing_evidence,
    step_of,
)
from distdiag.checks.shared.explanations import camps_by_place, explain, state_of
from distdiag.checks.shared.stuck import activity_of_missing, is_late
from distdiag.events.collectives import Collective
from distdiag.findings.descriptions import (
    at,
    blocking_call,
    call_location,
    call_phrase,
    each_whereabouts,
)
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import Alignment, OpenCollective, Trigger

_WHY_CYCLE = "Each of these ranks waits for a call that another of them would make afterwards."
_FIX_CYCLE = "Make the calls of the process groups in one order on all ranks."


class MissingFromCollective(Check[OpenCollective]):
    """Some ranks never came to a collective in which the others wait.

    ## What it detects
    A collective that some ranks of its group called and others did not: they finished their script,
    wait for one another in a circle, or have not moved for the hang threshold. Speaks where nothing
    more particular does: a guard (COL009), an uneven loop (COL011), a failure (HNG001, HNG002), or
    what the missing rank does instead (HNG004 and those after it).

    ## Why it matters
    The ranks that came wait until the timeout of the process group, often half an hour, and are
    then all killed together.

    ## Example
    Two ranks use two process groups in opposite order, and each waits for the other in its own.

    ## How to fix
    Look at where the missing rank is instead. Let it come to the call, or let nobody make it.

    ## References
    - `torch.distributed`: every rank of a group calls every collective of it, in one order
    - `torch.distributed.init_process_group(timeout=...)`
    """

    code = "COL001"
    name = "missing-from-collective"
    severity = Severity.ERROR

    why = "A collective ends only when every rank of its group has called it; these ranks did not."
    fix = (
        "Look at where the missing rank is: it took another branch, left early, waits in another "
        "process group, or is stuck in its own code. Let it make this call, or nobody."
    )
    fix_changes = "The missing rank takes part in the call and spends its time there."
    fix_leaves = "What kept the rank away, if that is slow storage, a lock or a lost message."
    disproof = "The missing rank has a record of this call under the same number."

    def check(self, alignment: OpenCollective) -> Iterator[Finding]:
        """Name the ranks that the others wait for, and where they are instead."""
        if alignment.kind != "collective" or explain(alignment) is not None:
            return
        if _is_message_deadlock(alignment):
            return  # said once, by the check of unmatched messages
        if is_late(alignment) or activity_of_missing(alignment) is not None:
            return
        verdict = blame_missing(alignment)
        call = alignment.by_rank[min(alignment.present_ranks)]
        is_cycle = alignment.trigger is Trigger.CYCLE
        is_cut_off = alignment.trigger is Trigger.ENDED
        is_note = is_cut_off or not is_reliable(alignment)
        yield self.finding(
            self._message(alignment, call),
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits) or call_location(call),
            grade=Grade.NOTE if is_note else verdict.grade,
            confidence=0.4 if is_note else verdict.confidence,
            evidence=camp_evidence(
                alignment, camps_by_place(alignment), lambda each: f"waits in {call_phrase(each)}"
            )
            + missing_evidence(alignment),
            why=_WHY_CYCLE if is_cycle else self.why,
            fix=_FIX_CYCLE if is_cycle else self.fix,
        )

    def _message(self, alignment: Alignment[Collective], call: Collective) -> str:
        missing = alignment.missing_ranks
        present = alignment.present_ranks
        instead = each_whereabouts([state_of(alignment, rank) for rank in missing])
        return (
            f"{missing.phrase()} never came to {call_phrase(call)}, which {present.phrase()} made"
            f"{at(call_location(call))}: {instead}"
        )


def _is_message_deadlock(alignment: Alignment[Collective]) -> bool:
    if alignment.trigger is not Trigger.CYCLE:
        return False
    calls = [blocking_call(state_of(alignment, rank)) for rank in alignment.missing_ranks]
    return any(call is not None and call.signature.peer is not None for call in calls)
