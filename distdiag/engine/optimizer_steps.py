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
    """Collect the states of optimizers until all ranks that keep the model have told theirs."""

    def __init__(self, world: RankSet) -> None:
        """Expect these ranks where nothing tells who keeps a model."""
        self._world = world
        self._open: dict[tuple[str, int], dict[int, OptimizerState]] = {}
        self._judged: dict[tuple[str, int], set[int]] = {}

    def add(self, event: OptimizerState) -> OptimizerAlignment | None:
        """Take in one event; return the alignment that it completes."""
        key = (event.optimizer, event.step)
        states = self._open.setdefault(key, {})
        states.setdefault(event.rank, event)
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        group = set(event.members or self._world)
        if not group <= states.keys():
            return None
        self._judged.setdefault(key, set()).update(group)
        if states.keys() >= set(self._world):
            self._open.pop(key, None)
        return _alignment(key, {rank: states[rank] for rank in sorted(group)})

    def rest(self) -> Iterator[OptimizerAlignment]:
        """Yield, at the end, those that not all ranks have reached."""
        for key, states in self._open.items():
            groups: dict[tuple[int, ...], dict[int, OptimizerState]] = {}
            for rank, state in states.items():
                if rank not in self._judged.get(key, ()):
                    groups.setdefault(state.members, {})[rank] = state
            for group in groups.values():
                yield _alignment(key, group)
        self._open.clear()


def _alignment(key: tuple[str, int], states: dict[int, OptimizerState]) -> OptimizerAlignment:
    return Alignment("optimizer", key, states, RankSet(states))
