"""HNG002: the process of a rank ended before its work was done, and it raised no exception."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.alignment import Alignment, Fate, RankState
from distdiag.checks.base import Check
from distdiag.event import Collective, Exited, Finished, Value
from distdiag.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import (
    at,
    call_location,
    call_phrase,
    exit_phrase,
    signal_name,
    user_location,
    whereabouts,
)
from distdiag.reasoning.endings import UNKNOWN, story_of
from distdiag.reasoning.failures import FirstEnd, contradicting_rank, first_end, is_settled

_LONGEST_REASON: Final = 200
"""As of an exception's message."""


class RankDied(Check):
    """The process of a rank ended before its work was done, and it raised no exception.

    ## What it detects
    The first process that was killed by a signal, crashed in C++, or left with a failing exit
    status (`sys.exit(3)`, `os._exit(1)`). Ranks that the launcher stops afterwards are not accused,
    and neither is a rank whose backend aborted over contradictory collectives, or one that ended
    after the job had been found to hang. If all ranks were ended from outside (SIGTERM to the
    launcher, a scheduler), or all left with the same status at the same line, it is a note.

    ## Why it matters
    Nothing is printed by a killed process, and what the others print is about lost connections.

    ## Example
    The host runs out of memory while rank 3 loads its checkpoint: SIGKILL.

    ## How to fix
    By how the process ended: a signal that asks to end was sent by somebody; SIGKILL is a
    scheduler, a person or, if the kernel counted such kills, a lack of memory; SIGSEGV and SIGABRT
    are crashes in native code; a status is what the program chose.

    ## References
    - `signal(7)`, `dmesg(1)`
    """

    code = "HNG002"
    name = "rank-died"
    severity = Severity.ERROR
    needs = (Exited, Finished, Collective)

    why = UNKNOWN.why
    fix = UNKNOWN.fix
    fix_changes = "The rank stays, and with it the job; nothing else changes."
    fix_leaves = "Messages of the other ranks about lost connections are consequences."
    disproof = "The rank wrote that it finished, or another rank had left before it."

    def check_missing(self, alignment: Alignment[Collective]) -> Iterator[Finding]:
        """Name the end at once when others wait for the rank."""
        missing = alignment.missing_ranks & alignment.states.keys()
        if any(alignment.states[rank].has_failed for rank in missing):
            yield from self._judge(alignment.states)

    def check_ranks(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        """Name the first rank that ended badly, unless an exception came before."""
        yield from self._judge(states)

    def _judge(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        end = first_end(states)
        if end is None or states[min(end.ranks)].raised is not None or not is_settled(end, states):
            return
        state = states[min(end.ranks)]
        others = RankSet(states.keys() - end.ranks)
        has_left = state.fate is Fate.FINISHED
        peer = contradicting_rank(state, states)
        is_consequence = peer is not None or state.left_hang
        is_note = is_consequence or end.is_outside or (has_left and not others)
        location = None if end.is_outside else _line(state)
        story = story_of(end, states)
        yield self.finding(
            _message(end, states, location, peer),
            ranks=end.ranks,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_note else Grade.PROVEN,
            confidence=0.95,
            evidence=tuple(_evidence(each) for each in states.values()),
            why=story.why,
            fix=story.fix,
        )


def _message(
    end: FirstEnd, states: Mapping[int, RankState], location: Location | None, peer: int | None
) -> str:
    who, state = end.ranks.phrase(), states[min(end.ranks)]
    if end.is_outside:
        how = dict.fromkeys(exit_phrase(states[rank].exit_status) for rank in end.ranks)
        was = "was ended from outside" if len(end.ranks) == 1 else "were all ended from outside"
        after = ", after the job had stood still" if state.left_hang else ""
        return f"{who} {was}{' and'.join(filter(None, how))}{after}"
    if state.finished is not None:
        reason = state.finished.message.strip().split("\n", maxsplit=1)[0][:_LONGEST_REASON]
        told = f" ({reason})" if reason else ""
        others = RankSet(r for r, s in states.items() if s.fate is not Fate.FINISHED)
        before = f", before {others.phrase()} had finished" if others else ""
        return f"{who} {whereabouts(state)}{told}{at(location)}{before}"
    call = state.last_call
    last = f"; it had last called {call_phrase(call)}{at(location)}" if call is not None else ""
    ending = f": its last collective contradicted that of rank {peer}" if peer is not None else ""
    return f"{who} {whereabouts(state)}{ending}{last}"


def _line(state: RankState) -> Location | None:
    """Return the line that asked for the end, or else that of the last call."""
    if state.finished is not None and state.finished.frames:
        return user_location(state.finished.frames)
    return call_location(state.last_call) if state.last_call is not None else None


def _evidence(state: RankState) -> Evidence:
    values: dict[str, Value] = {}
    status = state.exit_status
    if state.fate in (Fate.DIED, Fate.FINISHED) and status:
        values = {"signal": signal_name(-status)} if status < 0 else {"exit_status": status}
    if state.oom_kills:
        values["processes_killed_for_memory"] = state.oom_kills
    return Evidence(
        ranks=RankSet([state.rank]),
        summary=f"{whereabouts(state)}, in step {state.step}",
        location=_line(state),
        values=values,
    )
