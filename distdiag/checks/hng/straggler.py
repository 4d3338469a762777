"""HNG015: a rank computes for long while the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import blame_missing, location_in, missing_evidence, step_of
from distdiag.checks.shared.explanations import explain, state_of
from distdiag.checks.shared.stuck import activity_of_missing, is_late
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import OpenCollective


class Straggler(Check[OpenCollective]):
    """A rank computes for long while the others wait for it.

    ## What it detects
    A collective in which ranks have waited for the hang threshold, while those that they wait for
    use the processor all the time: they are slow, and will come. Always a note.

    ## Why it matters
    Each step takes as long as that of the slowest rank, and a rank that is too slow runs the
    others into the timeout of their process group.

    ## Example
    One rank got the longest document of the data set and tokenizes it for minutes.

    ## How to fix
    Give the ranks equal work: sort or bucket samples by length, spread long evaluations over all
    ranks. Look at the line where the slow rank is.

    ## References
    - `torch.distributed.init_process_group(timeout=...)`
    """

    code = "HNG015"
    name = "straggler"
    severity = Severity.INFO

    why = "The others can go on only when the slowest rank has come."
    fix = (
        "Look at the line where the slow rank computes: give the ranks equal work there, or let "
        "the others do something useful meanwhile."
    )
    fix_changes = "The order or the grouping of samples, if those are balanced."
    fix_leaves = "Ranks that are slow because of their hardware."
    disproof = "The rank uses no processor time: then it is stuck, and not slow."

    def check(self, alignment: OpenCollective) -> Iterator[Finding]:
        """Judge a collective whose missing ranks all work."""
        if alignment.kind != "collective" or not is_late(alignment):
            return
        if explain(alignment) is not None or activity_of_missing(alignment) is not None:
            return
        culprits = blame_missing(alignment).culprits
        state, call = state_of(alignment, min(culprits)), alignment.any_event
        location = location_in(alignment, culprits)
        yield self.finding(
            f"{culprits.phrase()} computes{at(location)} for {state.idle_s:.0f} s while "
            f"{alignment.present_ranks.phrase()} waits in {call_phrase(call)}"
            f"{at(call_location(call))}",
            ranks=culprits,
            step=step_of(alignment, culprits),
            location=location,
            grade=Grade.NOTE,
            confidence=0.6,
            evidence=(
                Evidence(
                    ranks=alignment.present_ranks,
                    summary=f"waits in {call_phrase(call)}",
                    location=call_location(call),
                ),
                *missing_evidence(alignment),
            ),
        )
