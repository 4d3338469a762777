"""Puts the backward passes of one step on all ranks side by side."""

from __future__ import annotations

from typing import Final

from distdiag.loss_event import LossWeights
from distdiag.loss_view import LossView, LossWindow
from distdiag.model_view import ScalingView, View
from distdiag.ranks import RankSet

MOST_OPEN: Final = 64
MOST_WINDOWS: Final = 16

_MORE: Final = 1.01
"""Gradients that were multiplied by more were not merely clipped."""

Key = tuple[str, tuple[int, ...]]


class LossWindows:
    """Collect the passes of each step until all ranks that combine gradients have told theirs."""

    def __init__(self, world: RankSet) -> None:
        """Expect these ranks where nothing tells who combines gradients."""
        self._world = tuple(world)
        self._open: dict[tuple[Key, int], dict[int, LossWeights]] = {}
        self._complete: dict[Key, tuple[LossWindow, ...]] = {}
        self._is_multiplied = False
        self._scalings: set[float] = set()

    def note(self, view: View) -> None:
        """Take note of gradients that were multiplied before a step."""
        if not isinstance(view, ScalingView):
            return
        if max(view.by_rank.values()) > _MORE:
            self._is_multiplied = True
        if len(self._scalings) < MOST_OPEN:
            self._scalings.update(view.by_rank.values())

    def add(self, event: LossWeights) -> LossView | None:
        """Take in one event; return the view that it completes."""
        key = (event.optimizer, event.members)
        seen = self._open.setdefault((key, event.step), {})
        seen.setdefault(event.rank, event)
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        group = event.members or self._world
        if not set(group) <= seen.keys():
            return None
        self._open.pop((key, event.step), None)
        window = LossWindow(event.step, {rank: seen[rank] for rank in sorted(group)})
        windows = (*self._complete.get(key, ()), window)[-MOST_WINDOWS:]
        self._complete[key] = windows
        is_told = bool(event.members)
        scalings = frozenset(self._scalings)
        return LossView(
            event.optimizer, RankSet(group), windows, is_told, self._is_multiplied, scalings
        )
