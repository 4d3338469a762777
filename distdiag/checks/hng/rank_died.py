"""HNG002: the process of a rank ended before its work was done, and it raised no exception."""

import signal
from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared import endings
from distdiag.checks.shared.failures import (
    FirstEnd,
    aborted_in_collective,
    contradicting_rank,
    first_end,
    is_failed_node,
    is_settled,
    last_word,
)
from distdiag.events.base import Frame, Value
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    at,
    call_location,
    call_phrase,
    exit_phrase,
    signal_name,
    user_location,
    whereabouts,
    who,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.views.alignment import OpenCollective
from distdiag.views.rank_states import (
    END_SIGNALS,
    JobView,
    RankState,
    RankStatus,
    was_asked_to_end,
)


def _story_of(end: FirstEnd, states: Mapping[int, RankState]) -> endings.Story | None:
    """Return what the exit status or signal tells; None if it is not known."""
    state = states[min(end.ranks)]
    if state.status is RankStatus.FINISHED and not end.is_outside:
        return endings.LEFT if end.ranks < states.keys() else endings.ALL_LEFT
    if any(states[rank].oom_kills for rank in end.ranks):
        return endings.OUT_OF_MEMORY
    if state.exited is not None and state.exited.cause:
        return endings.OF_CAUSES[state.exited.cause]
    return endings.OUTSIDE if end.is_outside else _story_of_status(state)


def _story_of_status(state: RankState) -> endings.Story | None:
    match state.exit_status:
        case None:
            return None
        case status if status == -signal.SIGKILL:
            # Without an agent nobody has counted what the kernel killed.
            return endings.KILLED_UNSEEN if state.is_reported_only else endings.KILLED
        case status if status == -signal.SIGBUS:
            return endings.BUS_ERROR
        case _ if _crashed_in(state):
            return endings.CRASHED_SEEN
        case status if status == -signal.SIGSEGV:
            return endings.SEGMENTATION
        case status if status < 0 and -status not in END_SIGNALS:
            return endings.CRASHED
        case status if status > 0 and not was_asked_to_end(status):
            return endings.FAILED
        case _:
            return endings.ASKED_TO_END


_CAUSES: Final[Mapping[str, str]] = {
    "out-of-memory": " for want of memory",
    "time-limit": " at the time limit of the job",
    "preempted": ", to make room for another job",
    "node-failed": ", since a node failed",
    "cancelled": ", since the job was cancelled",
}
_LONGEST_REASON: Final = 200
"""As of an exception's message."""


class RankDied(Check[OpenCollective | JobView]):
    """The process of a rank ended before its work was done, and it raised no exception.

    ## What you see
    The process of this rank is gone without a traceback, and the other ranks only report lost
    connections. A process that is killed, or that aborts in native code, cannot print a Python
    traceback.

    ## Example
        # wrong: every rank of a node loads the whole checkpoint, and the kernel kills one (SIGKILL)
        state = torch.load(path)

        # right: the file is mapped, and the ranks share its pages
        state = torch.load(path, mmap=True)

    ## How to fix
    Look at the exit status or signal in the launcher's output and the scheduler's log, and at the
    end of this rank's output for a C++ error.

    SIGKILL comes from a scheduler, a person or the kernel's out-of-memory killer
    (`dmesg | grep -i "killed process"`). SIGSEGV and SIGABRT are crashes in native code. The
    program itself chose any other exit status.

    Changes: The rank stays, and with it the job; nothing else changes.

    Leaves: Messages of the other ranks about lost connections are consequences.

    ## When it is not a defect
    The rank wrote that it finished, or another rank had left before it.

    If all ranks were ended from outside, or all left with the same status, it is a note. To silence
    it, set `ignore = ["HNG002"]` in `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA/DALI/issues/585
    - https://man7.org/linux/man-pages/man7/signal.7.html
    """

    code = "HNG002"
    name = "rank-died"
    severity = Severity.ERROR

    def check(self, view: OpenCollective | JobView) -> Iterator[Finding]:
        """Name the first rank that ended badly, at once when others wait for it."""
        states = view.states
        if isinstance(view, OpenCollective):
            missing = view.missing_ranks & states.keys()
            if not any(states[rank].has_failed for rank in missing):
                return
        end = first_end(states)
        if end is None and isinstance(view, JobView) and view.is_unexplained:
            end = last_word(states)
        if end is None or states[min(end.ranks)].raised is not None or not is_settled(end, states):
            return
        state = states[min(end.ranks)]
        if aborted_in_collective(state, states):
            yield self._aborted(end.ranks, states)
            return
        others = RankSet(states.keys() - end.ranks)
        has_left = state.status is RankStatus.FINISHED
        peer = contradicting_rank(state, states)
        is_consequence = peer is not None or state.left_hang
        is_note = is_consequence or end.is_outside or (has_left and not others)
        location = None if end.is_outside else _line(state)
        why, fix = _story_of(end, states) or (self.why, self.fix)
        yield self.finding(
            _message(end, states, location, peer),
            ranks=end.ranks,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_note else Grade.PROVEN,
            confidence=0.95,
            evidence=tuple(_evidence(each) for each in states.values()),
            why=why,
            fix=fix,
        )

    def _aborted(self, ranks: RankSet, states: Mapping[int, RankState]) -> Finding:
        """Name the victims of a timeout, where nothing tells who kept them waiting."""
        state = states[min(ranks)]
        call = state.waiting[0] if state.waiting else state.last_call
        location = call_location(call) if call is not None else None
        what = call_phrase(call) if call is not None else "a collective"
        absent = RankSet(set(call.group.ranks) - states.keys()) if call is not None else RankSet()
        unseen = f"; no record of {absent.phrase()} was read" if absent else ""
        return self.finding(
            f"{who(ranks, states)} waited in vain in {what}{at(location)} and aborted at the "
            f"timeout; no record says for which rank{unseen}",
            ranks=RankSet(),
            step=state.step,
            location=location,
            severity=Severity.WARNING,
            grade=Grade.LIKELY,
            confidence=0.6,
            evidence=tuple(_evidence(each) for each in states.values()),
            why=endings.ABORTED_WAITING.why,
            fix=endings.ABORTED_WAITING.fix,
        )


def _message(
    end: FirstEnd, states: Mapping[int, RankState], location: Location | None, peer: int | None
) -> str:
    subject, state = who(end.ranks, states), states[min(end.ranks)]
    cause = _CAUSES.get(state.exited.cause, "") if state.exited is not None else ""
    if is_failed_node(state):
        return f"{subject} failed, and the job with it"
    if end.is_outside:
        how = dict.fromkeys(exit_phrase(states[rank].exit_status) for rank in end.ranks)
        was = "was ended from outside" if len(end.ranks) == 1 else "were all ended from outside"
        after = ", after the job had stood still" if state.left_hang else ""
        return f"{subject} {was}{' and'.join(filter(None, how))}{after}{cause}"
    if state.finished is not None:
        reason = state.finished.message.strip().split("\n", maxsplit=1)[0][:_LONGEST_REASON]
        reason = f" ({reason})" if reason else ""
        others = RankSet(r for r, s in states.items() if s.status is not RankStatus.FINISHED)
        before = f", before {others.phrase()} had finished" if others else ""
        return f"{subject} {whereabouts(state)}{reason}{at(location)}{before}"
    if frames := _crashed_in(state):
        inner = frames[0]
        where = at(location) or f" ({inner.file.rpartition('/')[2]}:{inner.line})"
        return f"{subject} {whereabouts(state)}{cause} in {inner.function}{where}"
    call = state.last_call
    last = f"; it had last called {call_phrase(call)}{at(location)}" if call is not None else ""
    ending = f": its last collective contradicted that of rank {peer}" if peer is not None else ""
    return f"{subject} {whereabouts(state)}{cause}{ending}{last}"


def _crashed_in(state: RankState) -> tuple[Frame, ...]:
    """Return the stack that faulthandler printed of the thread in which the process crashed."""
    seen = state.stacks
    if seen is None or seen.source != "faulthandler" or not _has_crashed(state):
        return ()
    return next((thread.frames for thread in seen.threads if thread.active), ())


def _has_crashed(state: RankState) -> bool:
    status = state.exit_status
    return status is not None and status < 0 and -status not in END_SIGNALS


def _line(state: RankState) -> Location | None:
    """Return the line that asked for the end or crashed, or else that of the last call."""
    if frames := _crashed_in(state):
        return user_location(frames)
    if state.finished is not None and state.finished.frames:
        return user_location(state.finished.frames)
    return call_location(state.last_call) if state.last_call is not None else None


def _evidence(state: RankState) -> Evidence:
    values: dict[str, Value] = {}
    status = state.exit_status
    if state.status in (RankStatus.DIED, RankStatus.FINISHED) and status:
        values = {"signal": signal_name(-status)} if status < 0 else {"exit_status": status}
    if state.oom_kills:
        values["processes_killed_for_memory"] = state.oom_kills
    return Evidence(
        ranks=RankSet([state.rank]),
        summary=whereabouts(state) + (f", in step {state.step}" if state.knows_step else ""),
        location=_line(state),
        values=values,
    )
