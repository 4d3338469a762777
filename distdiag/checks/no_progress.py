"""HNG003: the job stands still, and no collective says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distdiag.alignment import Fate, RankState
from distdiag.checks.base import Check
from distdiag.event import Collective, Heartbeat
from distdiag.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import (
    blocking_call,
    each_whereabouts,
    frames_of,
    user_location,
    whereabouts,
)
from distdiag.reasoning.failures import has_contradiction


class NoProgress(Check):
    """The job stands still, and no collective says why.

    ## What it detects
    No rank that runs has moved for the hang threshold, and it is not that one waits for another
    in a collective: all are in their own code, a lock, a file system, native code that holds the
    GIL; or all are in the same collective and it does not end. A rank that uses the processor is
    late, not stuck: a note.

    ## Why it matters
    No timeout of a process group covers such a wait. The job burns its allocation until it is
    killed.

    ## Example
    Every rank waits for the lock of an extension build that a killed process left behind.

    ## How to fix
    Look at the line of each rank in the evidence: it says what is waited for.

    ## References
    - `py-spy dump`, `faulthandler`
    """

    code = "HNG003"
    name = "no-progress"
    severity = Severity.ERROR
    needs = (Heartbeat, Collective)

    why = "No rank has issued a call, drawn a batch or run a backward pass for the whole threshold."
    fix = "Look at the lines in the evidence and free what they wait for: a lock, a file, a server."
    fix_changes = "Nothing else, if what was waited for comes."
    fix_leaves = "The job may still be slow where it was stuck."
    disproof = "The job goes on by itself: it was slow and not stuck. Raise --hang-timeout then."

    def check_ranks(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        """Speak only when all running ranks stand still and no rank has failed."""
        running = [state for state in states.values() if state.fate is Fate.RUNNING]
        has_failed = any(state.fate in (Fate.RAISED, Fate.DIED) for state in states.values())
        if not running or has_failed or not all(_stands_still(state) for state in running):
            return
        if has_contradiction(states) or any(_is_explained(s, states) for s in running):
            return
        waiting = RankSet(s.rank for s in running if blocking_call(s) is not None)
        silent = RankSet(s.rank for s in states.values() if s.fate is Fate.SILENT)
        free = RankSet(s.rank for s in running if s.rank not in waiting)
        odd = silent or free or waiting
        is_late = all(states[rank].is_working and not states[rank].gil_held for rank in odd)
        location = _line(states[min(odd)])
        yield self.finding(
            f"nothing has moved for {min(s.idle_s for s in running):.0f} s: "
            f"{each_whereabouts([states[rank] for rank in odd])}",
            ranks=odd,
            step=states[min(odd)].step,
            location=location,
            grade=Grade.NOTE if is_late else Grade.LIKELY,
            confidence=0.3 if is_late else 0.8,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([state.rank]), summary=whereabouts(state), location=_line(state)
                )
                for state in states.values()
            ),
        )


def _stands_still(state: RankState) -> bool:
    return state.idle_s >= 1.0


def _line(state: RankState) -> Location | None:
    return user_location(frames_of(state))


def _is_explained(state: RankState, states: Mapping[int, RankState]) -> bool:
    """Say whether a rank waits for one that has not come, which other checks tell."""
    call = blocking_call(state)
    if call is None:
        return False
    if call.collective_seq_id < 0:
        return True
    peers = [states[rank] for rank in call.group.ranks if rank in states]
    return any(not _has_reached(peer, call) for peer in peers)


def _has_reached(state: RankState, call: Collective) -> bool:
    return any(
        other.group.name == call.group.name
        and other.group.generation == call.group.generation
        and other.collective_seq_id >= call.collective_seq_id
        for other in state.recent
    )
