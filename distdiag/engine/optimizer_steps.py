"""Puts the same step of an optimizer on all ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.alignment import Alignment
from distdiag.model_event import OptimizerState
from distdiag.ranks import RankSet

MOST_OPEN: Final = 256

OptimizerAlignment = Alignment[OptimizerState]


class OptimizerSteps:
    """Collect the states of optimizers until all ranks have told theirs."""

    def __init__(self, world: RankSet) -> None:
        """Expect these ranks."""
        self._world = world
        self._open: dict[tuple[str, int], dict[int, OptimizerState]] = {}

    def add(self, event: OptimizerState) -> OptimizerAlignment | None:
        """Take in one event; return the alignment that it completes."""
        key = (event.optimizer, event.step)
        states = self._open.setdefault(key, {})
        states.setdefault(event.rank, event)
        members = {rank for state in states.values() for rank in state.members} or self._world
        if not states.keys() >= set(members):
            if len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return None
        del self._open[key]
        return self._alignment(key, states)

    def rest(self) -> Iterator[OptimizerAlignment]:
        """Yield, at the end, those that not all ranks have reached."""
        for key, states in self._open.items():
            yield self._alignment(key, states)
        self._open.clear()

    def _alignment(
        self, key: tuple[str, int], states: dict[int, OptimizerState]
    ) -> OptimizerAlignment:
        return Alignment("optimizer", key, states, RankSet(states))
