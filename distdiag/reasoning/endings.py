"""What an exit status or a signal tells of how a process ended, and what to do about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final, NamedTuple

from distdiag.alignment import TOLD_TO_END, Fate, RankState
from distdiag.reasoning.failures import FirstEnd


class Story(NamedTuple):
    """Why processes end in one way, and what to do about it."""

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
_TOLD: Final = Story(
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
UNKNOWN: Final = Story(
    "A process that is killed or aborts says nothing; its peers only see the connection close. "
    "Nobody saw how this one ended: its launcher had asked the kernel first.",
    "Look at what the launcher says of its exit status or signal, in the scheduler's log, and "
    "above the end of this rank's output for a C++ error.",
)


def story_of(end: FirstEnd, states: Mapping[int, RankState]) -> Story:
    """Return what is to be said of the end of the job that began in this way."""
    state = states[min(end.ranks)]
    if state.fate is Fate.FINISHED and not end.is_outside:
        return _LEFT if end.ranks < states.keys() else _ALL_LEFT
    if any(states[rank].oom_kills for rank in end.ranks):
        return _OUT_OF_MEMORY
    if end.is_outside:
        return _OUTSIDE
    match state.exit_status:
        case None:
            return UNKNOWN
        case status if status == -signal.SIGKILL:
            return _KILLED
        case status if status < 0 and -status not in TOLD_TO_END:
            return _CRASHED
        case _:
            return _TOLD
