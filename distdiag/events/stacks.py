"""What is seen of a rank from outside: stacks of its threads, and facts of its process."""

import msgspec

from distdiag.events.base import Event, Frame, Value


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """The stack of one thread, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    holds_gil: bool = False
    active: bool = False


class Stacks(Event, frozen=True, kw_only=True):
    """The stacks of all threads of a rank. `source` names the tool; `error` why there are none.

    `is_native`: the frames of C and C++ are there, too, as evidence for what was found by others.
    """

    source: str
    threads: tuple[ThreadStack, ...] = ()
    error: str = ""
    is_native: bool = False


class ProcessSeen(msgspec.Struct, frozen=True, array_like=True):
    """A process beside that of a rank: one that it started, or that has what it waits for.

    `command` is its command line, shortened; `doing` what its main thread does, as the kernel sees
    it. `has_it`: it has the lock, or the other end of the pipe, that the rank waits for. `rank` is
    its own where it is a rank of this node, `parent_rank` the rank that started it, itself or by
    others; `is_forked`: it runs the same command as that. `exit_status` is minus the number of a
    signal: it has ended, and its parent has not asked for that yet. `threads` are its Python
    stacks, if it has any.
    """

    pid: int
    command: str
    doing: str = ""
    has_it: bool = False
    rank: int | None = None
    parent_rank: int | None = None
    is_forked: bool = False
    exit_status: int | None = None
    threads: tuple[ThreadStack, ...] = ()


class Observed(Event, frozen=True, kw_only=True):
    """What somebody outside of a rank's process saw of it, such as the kernel or the GPU's driver.

    `source` names who saw it, `summary` is one sentence, `values` are its figures by name (units in
    the names: ``rss_bytes``); `error` says why there is nothing. `processes` are others that matter
    to the rank.
    """

    source: str
    summary: str = ""
    values: dict[str, Value] = msgspec.field(default_factory=dict)
    error: str = ""
    processes: tuple[ProcessSeen, ...] = ()


class FaultLogged(Event, frozen=True, kw_only=True):
    """A line in a log of this rank, or of its node, is that of a known fault.

    `fault` is the id of the row, `text` the line, `place` where it begins in its file.
    `was_survived`: the process went on for long after that. `is_rank_known`: nothing says whose
    line it is, and `rank` is only the one under which it is kept.
    """

    fault: str
    text: str
    file: str
    place: int = 0
    was_survived: bool = False
    is_rank_known: bool = True
