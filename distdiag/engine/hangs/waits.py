"""Calls that cannot end: their records contradict one another, or they wait for one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from distdiag.engine.collectives.calls import CollectiveAlignment, group_key
from distdiag.events.base import Phase
from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment
from distdiag.views.invariants import Aspect, contradiction
from distdiag.views.rank_states import RankState

# Who waits for whom, and whether that can still end.

AnyAlignment = Alignment[Collective] | Alignment[GroupCreated]

CYCLE_IDLE_S: Final = 1.0
"""So long must two ranks stand still before a cycle between them counts as one."""
WORKING_PATIENCE: Final = 6
"""A rank that works, or for which others do, has so many times the threshold of the user."""
SLOW_PHASES: Final = frozenset({Phase.COMPILE, Phase.CHECKPOINT})
SLOW_PHASE_PATIENCE: Final = 10
"""A rank that compiles or saves is given so many times the threshold that the steps suggest.

So is one whose children work for it.
"""


@dataclass(frozen=True, slots=True)
class Wait:
    """An alignment that some ranks have reached and others have not."""

    alignment: AnyAlignment

    @property
    def waiting(self) -> RankSet:
        """The ranks that are there."""
        return self.alignment.present_ranks

    @property
    def awaited(self) -> RankSet:
        """The ranks that are not."""
        return self.alignment.missing_ranks

    @property
    def everyone(self) -> frozenset[int]:
        """The ranks that are there and those that are not."""
        return frozenset(self.alignment.expected_ranks)


def closure(wait: Wait, waits: Iterable[Wait]) -> frozenset[int]:
    """Return the ranks of a wait and all ranks that those wait for, directly or not."""
    edges = [(other.waiting, other.awaited) for other in waits]
    ranks = set(wait.waiting) | set(wait.awaited)
    pending = list(ranks)
    while pending:
        rank = pending.pop()
        for waiting, awaited in edges:
            if rank in waiting:
                new = set(awaited) - ranks
                ranks |= new
                pending += new
    return frozenset(ranks)


def in_cycle(
    wait: Wait, waits: Iterable[Wait], states: Mapping[int, RankState], *, is_stalled: bool = False
) -> bool:
    """Whether every awaited rank is itself blocked on a rank that waits here.

    Only calls that block the host count: an asynchronous call, or one that was waited for, does not
    keep its rank from going on. In a job that has stalled any call does.
    """
    others = [other for other in waits if other.alignment is not wait.alignment]

    def is_blocked(rank: int, at: Wait) -> bool:
        return is_stalled or _is_blocked(states[rank], at.alignment)

    if not wait.awaited or not all(is_blocked(rank, wait) for rank in wait.waiting):
        return False
    return all(
        any(
            rank in other.waiting
            and is_blocked(rank, other)
            and set(other.awaited) & set(wait.waiting)
            for other in others
        )
        for rank in wait.awaited
    )


def _is_blocked(state: RankState, alignment: AnyAlignment) -> bool:
    if state.idle_s < CYCLE_IDLE_S:
        return False
    event = alignment.by_rank[state.rank]
    if isinstance(event, GroupCreated):
        return True
    return (
        not event.is_async
        and state.last_call is event
        and state.last_call_state in ("scheduled", "issued")
    )


def cannot_come(alignment: AnyAlignment, states: Mapping[int, RankState]) -> bool:
    """Whether a missing rank has left, so that it can never reach this point.

    Ranks that died after another one had left badly were killed by the launcher: they say nothing.
    """
    first_bad = min(
        (s.left_ns for s in states.values() if s.left_ns and (s.raised or s.exited)), default=0
    )
    missing = [states[rank] for rank in alignment.missing_ranks if rank in states]
    return any(
        state.left_ns and not state.incomplete and (not first_bad or state.left_ns <= first_bad)
        for state in missing
    )


def works(state: RankState) -> bool:
    """Whether a rank that does not move uses the processor, or others do for it."""
    return (state.is_working or state.help is not None) and not state.gil_held


def stalled(
    ranks: Iterable[int],
    states: Mapping[int, RankState],
    *,
    threshold_s: float,
    is_explicit: bool,
    may_work: bool = True,
) -> bool:
    """Whether none of these ranks has moved for the threshold.

    A rank that uses the processor and waits for nobody works: it has the patience of
    `WORKING_PATIENCE` thresholds if the user set the threshold, and any time if not. One whose
    children work, or that transfers data, has `SLOW_PHASE_PATIENCE` in the latter case: then its
    stack tells what it waits for. Compiling and saving may take longer than steps do: they have
    `SLOW_PHASE_PATIENCE`, unless the user set it. Without `may_work` a busy processor is no excuse:
    waiting for a GPU looks the same.
    """
    for state in (states[rank] for rank in ranks if rank in states):
        if state.left_ns:
            continue
        is_slow = not is_explicit and state.phase in SLOW_PHASES and not state.waiting
        if state.idle_s < threshold_s * (SLOW_PHASE_PATIENCE if is_slow else 1):
            return False
        if may_work and works(state):
            lenient = float("inf") if state.is_working else SLOW_PHASE_PATIENCE
            patience = WORKING_PATIENCE if is_explicit else lenient
            if state.idle_s < threshold_s * patience:
                return False
    return True


# Finds the calls that cannot end.

_ENDLESS: Final = frozenset({Aspect.OP, Aspect.ROOT, Aspect.SHAPE})
"""Ranks that differ in these wait for data that nobody sends. Other unlike calls may well end."""


class Contradictions:
    """Collectives that all ranks have called, each something else."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], CollectiveAlignment] = {}

    def add(self, alignment: CollectiveAlignment) -> None:
        """Take in a point that a check has reported; the first one of each group counts."""
        if contradiction(alignment) in _ENDLESS:
            self._found.setdefault(group_key(alignment.any_event.group), alignment)

    def blocking(self, states: Mapping[int, RankState]) -> Iterator[frozenset[int]]:
        """Yield the ranks of a group that all wait in the call where they differ, or behind it."""
        for alignment in self._found.values():
            if all(_is_held(states[rank], alignment) for rank in alignment.expected_ranks):
                yield frozenset(alignment.expected_ranks)


def _is_held(state: RankState, alignment: Alignment[Collective]) -> bool:
    """Whether a rank's host is in a call of this group, the one of this point or a later one."""
    mine, now = alignment.by_rank[state.rank], state.last_call
    if now is None or state.left_ns or state.incomplete:
        return False
    is_inside = not now.is_async and state.last_call_state in ("scheduled", "issued")
    return (
        # Before a backward pass ends, its host waits for the calls that DDP's reducer has made.
        (is_inside or state.phase is Phase.BACKWARD)
        and group_key(now.group) == group_key(mine.group)
        and now.collective_seq_id >= mine.collective_seq_id
    )
