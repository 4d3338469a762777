"""HNG002: the process of a rank ended before its work was done, and it raised no exception."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from distdiag.checks.base import Check
from distdiag.checks.shared.failures import FirstEnd, contradicting_rank, first_end, is_settled
from distdiag.events.base import Value
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    at,
    call_location,
    call_phrase,
    exit_phrase,
    signal_name,
    user_location,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.views.alignment import OpenCollective
from distdiag.views.rank_states import END_SIGNALS, JobView, RankState, RankStatus


class Story(NamedTuple):
    """Why a process ended in this way, and what to do about it."""

    why: str
    fix: str


_LEFT: Final = Story(
    "A rank that leaves with a failing status ends the job: the launcher stops the other ranks, "
    "wherever they are.",
    "Look at why the program leaves at this line on this rank and not on the others. If it may "
    "stop early, let all ranks decide it together and leave with status 0.",
)
_ALL_LEFT: Final = Story(
    "All ranks left in the same way: the program itself decided to fail.",
    "Look at the condition of this exit, and at what the ranks wrote before it.",
)
_OUTSIDE: Final = Story(
    "Such a signal to all ranks comes from a launcher, a scheduler or a person; no fault of the "
    "program sends it.",
    "Ask who stopped the job: a time limit, a pre-emption, scancel, a signal to the launcher, or "
    "the failure of another node. The program need not change.",
)
_ASKED_TO_END: Final = Story(
    "No fault of a program sends this signal: somebody ended this rank, and the others cannot go "
    "on without it.",
    "Ask who sent it: a script, a limit for single processes, the launcher of another node.",
)
_OUT_OF_MEMORY: Final = Story(
    "While this job ran, the kernel's out-of-memory killer ended processes here, and it does so by "
    "SIGKILL: the memory of the host, or of the job's cgroup, was used up.",
    "Use less host memory on this node (data loader workers, pinned buffers, checkpoints that all "
    "ranks load at once), or ask for more. The kernel log names the process and its size.",
)
_KILLED: Final = Story(
    "SIGKILL comes from outside of the process, and leaves it no time to say anything. The "
    "kernel's out-of-memory killer has ended nothing here that was counted.",
    "Look in the scheduler's log for a limit or a pre-emption, and ask who may have killed it.",
)
_CRASHED: Final = Story(
    "The process crashed in native code, below Python: such an end prints no Python traceback.",
    "Read the last lines that this rank wrote (an assertion of C++ or CUDA). Run it again with "
    "`python -X faulthandler` for the line of Python, or look at the core file.",
)


def _story_of(end: FirstEnd, states: Mapping[int, RankState]) -> Story | None:
    """Return what the exit status or signal tells; None if it is not known."""
    state = states[min(end.ranks)]
    if state.status is RankStatus.FINISHED and not end.is_outside:
        return _LEFT if end.ranks < states.keys() else _ALL_LEFT
    if any(states[rank].oom_kills for rank in end.ranks):
        return _OUT_OF_MEMORY
    if end.is_outside:
        return _OUTSIDE
    match state.exit_status:
        case None:
            return None
        case status if status == -signal.SIGKILL:
            return _KILLED
        case status if status < 0 and -status not in END_SIGNALS:
            return _CRASHED
        case _:
            return _ASKED_TO_END


_LONGEST_REASON: Final = 200
"""As of an exception's message."""


class RankDied(Check[OpenCollective | JobView]):
    """The process of a rank ended before its work was done, and it raised no exception.

    ## What you see
    A process that is killed or aborts prints nothing; the other ranks only report lost connections.
    How it ended is unknown where its launcher had asked the kernel first.

    ## Example
        # wrong: every rank of a node loads the whole checkpoint, and the kernel kills one (SIGKILL)
        state = torch.load(path)

        # right: the file is mapped, and the ranks share its pages
        state = torch.load(path, mmap=True)

    ## How to fix
    Look at what the launcher says of its exit status or signal, in the scheduler's log, and above
    the end of this rank's output for a C++ error.

    SIGKILL is a scheduler, a person or, if the kernel counted such kills, a lack of memory; SIGSEGV
    and SIGABRT are crashes in native code; a status is what the program chose.

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
        if end is None or states[min(end.ranks)].raised is not None or not is_settled(end, states):
            return
        state = states[min(end.ranks)]
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
        reason = f" ({reason})" if reason else ""
        others = RankSet(r for r, s in states.items() if s.status is not RankStatus.FINISHED)
        before = f", before {others.phrase()} had finished" if others else ""
        return f"{who} {whereabouts(state)}{reason}{at(location)}{before}"
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
    if state.status in (RankStatus.DIED, RankStatus.FINISHED) and status:
        values = {"signal": signal_name(-status)} if status < 0 else {"exit_status": status}
    if state.oom_kills:
        values["processes_killed_for_memory"] = state.oom_kills
    return Evidence(
        ranks=RankSet([state.rank]),
        summary=f"{whereabouts(state)}, in step {state.step}",
        location=_line(state),
        values=values,
    )
