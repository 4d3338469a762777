"""Calls that cannot end: their records contradict one another, or they wait for one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.alignment import Alignment, RankState
from distdiag.engine.collectives import CollectiveAlignment, group_key
from distdiag.event import Collective, Phase
from distdiag.reasoning.invariants import Aspect, contradiction

_ENDLESS: Final = frozenset({Aspect.OP, Aspect.ROOT, Aspect.SHAPE})
"""Ranks that differ in these wait for data that nobody sends. Other unlike calls may well end."""


class Contradictions:
    """Collectives that all ranks have called, each something else."""

    def __init__(self) -> None:
        """Start with none."""
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
