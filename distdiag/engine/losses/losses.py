"""Shows the losses of all ranks to the checks, and knows whether there were any."""

from __future__ import annotations

from typing import Final

from distdiag.engine.runner import Judges
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.losses import LossWeights
from distdiag.events.ranks import RankSet
from distdiag.views.losses import LossView, LossWindow
from distdiag.views.models import ScalingView, View

# Puts the backward passes of one step on all ranks side by side.

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


# ---


class LossWatch:
    """Feed the losses of the ranks as they come."""

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Watch the losses of these ranks."""
        self._judges = judges
        self._windows = LossWindows(world)
        self._is_read = False
        self._blind: set[int] = set()

    @property
    def not_checked(self) -> dict[str, str]:
        """The codes of the checks of losses, if not all losses were seen, and why."""
        if self._blind:
            why = f"the losses of {RankSet(self._blind).phrase()} are not observed wholly"
        elif not self._is_read:
            why = "no loss was seen of a kind that can be weighed"
        else:
            return {}
        return {check.code: why for check in self._judges.needing(LossWeights)}

    def note(self, view: View) -> None:
        """Take note of what is known of a model."""
        self._windows.note(view)

    def feed(self, event: LossWeights | ProbeDisabled) -> None:
        """Take in one event of one rank."""
        if isinstance(event, ProbeDisabled):
            if event.probe == "losses":
                self._blind.add(event.rank)
            return
        self._is_read = self._is_read or any(event.passes)
        view = self._windows.add(event)
        if view is not None:
            self._judges.judge_losses(view)
