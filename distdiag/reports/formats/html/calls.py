"""Calls of process groups as the recording has them: how far each went, and who is still in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from distdiag.events.base import Event, Phase
from distdiag.events.collectives import Collective, CollectiveState, ProcessGroup
from distdiag.events.lifecycle import Finished, Heartbeat, Raised
from distdiag.reports.recording import Recording
from distdiag.reports.words import shown_path

GroupKey = tuple[str, tuple[int, ...], int]
_DONE: Final = frozenset({"waited", "completed", "failed", "dropped"})


@dataclass(slots=True)
class Call:
    """One call of a rank; `state` is the furthest that it went, `until_ns` when, where known."""

    event: Collective
    state: str = "scheduled"
    until_ns: int = 0

    @property
    def is_over(self) -> bool:
        """Whether its host went on from it."""
        return self.state in _DONE


@dataclass(frozen=True)
class Calls:
    """The calls of all ranks, in the order of each.

    `gone` are the ranks whose scripts ended; the last that was heard of those `in_backward` is that
    they were in a backward pass, at whose end the host waits for what DDP's reducer has called.
    """

    by_rank: Mapping[int, tuple[Call, ...]]
    last_event: Mapping[int, Event]
    gone: frozenset[int] = frozenset()
    in_backward: frozenset[int] = frozenset()

    @cached_property
    def held(self) -> dict[int, Call]:
        """The call in which the main thread of a rank is, by the ranks that are in one."""
        found = {}
        for rank, calls in self.by_rank.items():
            if rank in self.gone or not calls:
                continue
            last = calls[-1]
            is_last = last.event.seq >= self.last_event[rank].seq or last.state == "scheduled"
            waits = not last.event.is_async or rank in self.in_backward
            if is_last and waits and not last.is_over:
                found[rank] = last
        return found

    @cached_property
    def by_group(self) -> dict[GroupKey, dict[int, dict[int, Call]]]:
        """The collectives by their group, their rank and their number in the group."""
        found: dict[GroupKey, dict[int, dict[int, Call]]] = {}
        for rank, calls in self.by_rank.items():
            for call in calls:
                if call.event.collective_seq_id >= 0:
                    by_rank = found.setdefault(group_key(call.event.group), {})
                    by_rank.setdefault(rank, {})[call.event.collective_seq_id] = call
        return found


def group_key(group: ProcessGroup) -> GroupKey:
    """Return what is the same for a process group on all of its ranks."""
    return (group.name, group.ranks, group.generation)


def read_calls(recording: Recording) -> Calls:
    """Find the calls of each rank and how far they went."""
    by_rank: dict[int, tuple[Call, ...]] = {}
    last_event: dict[int, Event] = {}
    gone: set[int] = set()
    for rank, recent in recording.by_rank.items():
        calls: dict[int, Call] = {}
        for event in recent.events:
            match event:
                case Collective():
                    calls[event.seq] = Call(event)
                case CollectiveState(call=number) if number in calls:
                    calls[number].state = event.state
                    if event.time_ns > calls[number].event.time_ns:
                        calls[number].until_ns = event.time_ns
                case Finished() | Raised():
                    gone.add(rank)
        by_rank[rank] = tuple(calls.values())
        acts = (event for event in recent.events if not isinstance(event, CollectiveState))
        last = max(acts, key=lambda event: event.seq, default=None)
        if last is not None:
            last_event[rank] = last
    beats = recording.last_of(Heartbeat)
    in_backward = {rank for rank, beat in beats.items() if beat.phase is Phase.BACKWARD}
    return Calls(by_rank, last_event, frozenset(gone), frozenset(in_backward))


def what(call: Collective) -> str:
    """Return ``all_reduce (4, 8) float32``: what a call asks for, without its number."""
    signature = call.signature
    sizes = signature.input_sizes or signature.output_sizes
    parts = [signature.op]
    parts += [f"({', '.join(map(str, size))})" for size in sizes[:2]]
    parts += ["…"] if len(sizes) > 2 else []
    parts += [*dict.fromkeys(signature.dtypes)]
    parts += [signature.reduce_op] if signature.reduce_op else []
    parts += [f"root {signature.root}"] if signature.root is not None else []
    parts += [f"peer {signature.peer}"] if signature.peer is not None else []
    return " ".join(parts)


def place(call: Collective, folder: str | None = None) -> str:
    """Return the user's line of a call as ``train.py:41``, or an empty text."""
    frame = call.site.location
    return f"{shown_path(frame.file, folder)}:{frame.line}" if frame is not None else ""


def spoken(call: Collective) -> str:
    """Return ``all_reduce #12 of default_pg``."""
    number = f" #{call.collective_seq_id}" if call.collective_seq_id >= 0 else ""
    return f"{call.signature.op}{number} of {call.group.label}"
