"""What several files, or parts of one file, say together of how processes ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from distdiag.dumps.reading import RankDump
from distdiag.events.base import Frame
from distdiag.events.lifecycle import Exited, Raised
from distdiag.events.stacks import Observed

Ranks = list[int | None]

_MAIN: Final = "MainThread"
_OUT_OF_MEMORY: Final = "out-of-memory"


def has_end(dump: RankDump) -> bool:
    """Say whether a dump tells that a process ended, or that an exception was not caught."""
    return any(isinstance(event, Raised | Exited) for event in dump.events)


def settled(dumps: Sequence[RankDump], ranks: Sequence[int | None]) -> tuple[list[RankDump], Ranks]:
    """Return what remains of ends when the parts are read together, with their ranks.

    A traceback that nobody signed belongs to the one rank that left with a failing status and has
    no other; a failing status of a local rank to the one rank of its node that raised. What repeats
    a traceback of a known rank goes, and so do vague ends beside others. A process that SIGKILL
    ended while the kernel killed for want of memory was killed for that.
    """
    given = _signed(dumps, ranks)
    is_certain = any(_ended(d) and not (d.is_vague or d.is_whole_job) for d in dumps)
    is_short = any(_causes(d) & {_OUT_OF_MEMORY} for d in dumps)
    known = {_key(d) for d, rank in zip(dumps, given, strict=True) if rank is not None}
    kept = [
        (_killed_for_memory(dump) if is_short else dump, rank)
        for dump, rank in zip(dumps, given, strict=True)
        if not (dump.is_vague and is_certain)
        and not (rank is None and not dump.label and _key(dump) and _key(dump) in known)
    ]
    return [dump for dump, _ in kept], [rank for _, rank in kept]


def of_whole_job(
    dumps: Sequence[RankDump], ranks: Sequence[int | None]
) -> tuple[list[RankDump], Ranks]:
    """Return what is true of the whole job as one dump for each rank."""
    pairs = zip(dumps, ranks, strict=True)
    everybody = sorted({rank for d, rank in pairs if rank is not None and not d.is_node})
    found: list[tuple[RankDump, int | None]] = []
    for dump, rank in zip(dumps, ranks, strict=True):
        if dump.is_whole_job and rank is None:
            found += [(dump, each) for each in everybody]
        else:
            found.append((dump, rank))
    return [dump for dump, _ in found], [rank for _, rank in found]


def _signed(dumps: Sequence[RankDump], ranks: Sequence[int | None]) -> Ranks:
    """Give tracebacks without a rank to the rank that must have written them."""
    raised = _ranks_where(dumps, ranks, _raised)
    failed = _ranks_where(dumps, ranks, _left_with_status) - raised
    first = _ranks_where(dumps, ranks, _is_root_cause)
    in_file: dict[str, set[int]] = {}
    tells_ends: set[str] = set()
    for dump, rank in zip(dumps, ranks, strict=True):
        in_file.setdefault(dump.path, set()).update({rank} if rank is not None else ())
        tells_ends.update({dump.path} if _exited(dump) else ())
    given = list(ranks)
    on_node: dict[str, set[int]] = {}
    for dump, rank in zip(dumps, ranks, strict=True):
        if rank is not None and _raised(dump) and dump.label:
            on_node.setdefault(dump.label, set()).add(rank)
    for place, (dump, rank) in enumerate(zip(dumps, ranks, strict=True)):
        if rank is None and not dump.label and _raised(dump):
            beside = failed & in_file[dump.path] if dump.path in tells_ends else failed
            beside = (beside & first) or beside
            given[place] = next(iter(beside)) if len(beside) == 1 else None
        elif rank is None and dump.node and _left_with_status(dump):
            here = on_node.get(dump.node, set())
            given[place] = next(iter(here)) if len(here) == 1 else None
    return given


def _ranks_where(
    dumps: Sequence[RankDump], ranks: Sequence[int | None], holds: Callable[[RankDump], bool]
) -> set[int]:
    pairs = zip(dumps, ranks, strict=True)
    return {rank for dump, rank in pairs if rank is not None and holds(dump)}


def _raised(dump: RankDump) -> bool:
    return any(isinstance(event, Raised) and event.thread == _MAIN for event in dump.events)


def _exited(dump: RankDump) -> bool:
    return any(isinstance(event, Exited) for event in dump.events)


def _ended(dump: RankDump) -> bool:
    return _raised(dump) or _exited(dump)


def _left_with_status(dump: RankDump) -> bool:
    return any(isinstance(e, Exited) and e.status is not None and e.status > 0 for e in dump.events)


def _is_root_cause(dump: RankDump) -> bool:
    return any(isinstance(e, Observed) and e.values.get("is_first_failure") for e in dump.events)


def _causes(dump: RankDump) -> set[str]:
    return {event.cause for event in dump.events if isinstance(event, Exited)}


def _killed_for_memory(dump: RankDump) -> RankDump:
    events = tuple(
        msgspec.structs.replace(event, cause=_OUT_OF_MEMORY)
        if isinstance(event, Exited) and event.status == -signal.SIGKILL and not event.cause
        else event
        for event in dump.events
    )
    return msgspec.structs.replace(dump, events=events)


def _key(dump: RankDump) -> tuple[str, str, Frame | None] | None:
    """Return what makes two tracebacks the same one, told twice."""
    raised = next((e for e in dump.events if isinstance(e, Raised)), None)
    if raised is None or len(dump.events) > 1:
        return None
    line = next((frame for frame in raised.frames if frame.user), None)
    return raised.type, raised.message.partition("\n")[0], line
