"""HNG003: the job stands still, and no collective says why."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.hng.stuck_rank import outside_evidence
from distdiag.checks.shared.activities import common_activity, is_busy
from distdiag.checks.shared.stuck import odd_ranks
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    blocking_call,
    each_whereabouts,
    frames_of,
    user_location,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.views.rank_states import Fate, JobView, RankState


class NoProgress(Check[JobView]):
    """The job stands still, and no collective says why.

    ## What it detects
    No rank that runs has moved for the hang threshold, and it is not that one waits for another
    in a collective, nor does anything tell what they do instead (HNG004 and those after it). A rank
    that uses the processor is late, not stuck: a note.

    ## Why it matters
    No timeout of a process group covers such a wait. The job burns its allocation until it is
    killed.

    ## Example
    Every rank polls in a loop of its own for something that never happens.

    ## How to fix
    Look at the line of each rank in the evidence: it says what is waited for.

    ## References
    - `py-spy dump`, `faulthandler`
    """

    code = "HNG003"
    name = "no-progress"
    severity = Severity.ERROR

    why = "No rank has issued a call, drawn a batch or run a backward pass for the whole threshold."
    fix = "Look at the lines in the evidence and free what they wait for: a lock, a file, a server."
    fix_changes = "Nothing else, if what was waited for comes."
    fix_leaves = "The job may still be slow where it was stuck."
    disproof = "The job goes on by itself: it was slow and not stuck. Raise --hang-timeout then."

    def check(self, view: JobView) -> Iterator[Finding]:
        """Speak only when all running ranks stand still and no check knows what they do."""
        states = view.states
        odd = odd_ranks(states)
        if not odd or common_activity(states[rank] for rank in odd) is not None:
            return
        if all(blocking_call(states[rank]) is not None for rank in odd):
            return  # all are in one collective: said by the check of those
        running = [state for state in states.values() if state.fate is Fate.RUNNING]
        is_late = all(is_busy(states[rank]) for rank in odd)
        yield self.finding(
            f"nothing has moved for {min(s.idle_s for s in running):.0f} s: "
            f"{each_whereabouts([states[rank] for rank in odd])}",
            ranks=odd,
            step=states[min(odd)].step,
            location=_line(states[min(odd)]),
            grade=Grade.NOTE if is_late else Grade.LIKELY,
            confidence=0.3 if is_late else 0.8,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([state.rank]), summary=whereabouts(state), location=_line(state)
                )
                for state in states.values()
            )
            + outside_evidence(states, odd),
        )


def _line(state: RankState) -> Location | None:
    return user_location(frames_of(state))
