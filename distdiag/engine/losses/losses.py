"""Shows the losses of all ranks to the checks, and knows whether there were any."""

from collections import deque
from collections.abc import Iterator
from typing import Final

from distdiag.engine.aligner import LIGHT, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.events.base import Event
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.losses import LossWeights
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.losses import (
    AuxLossView,
    CombinedAuxLossView,
    CombinedLossView,
    LossView,
    LossWindow,
    has_aux,
)
from distdiag.views.models import ScalingView

# Puts the backward passes of one step on all ranks side by side.

_NO_LOSS: Final = NothingThere(
    "losses over tokens", "no loss was seen of a kind that can be weighed"
)
_NO_AUX: Final = NothingThere("experts", "no auxiliary (load-balancing) loss was seen in a loss")
MOST_OPEN: Final = 64
MOST_WINDOWS: Final = 16

_MORE: Final = 1.01
"""Gradients that were multiplied by more were not merely clipped."""

Key = tuple[str, tuple[int, ...]]


class LossWindows:
    """Collect the passes of each step until all ranks that combine gradients have reported."""

    def __init__(self, world: RankSet) -> None:
        self._world = tuple(world)
        self._open: dict[tuple[Key, int], dict[int, LossWeights]] = {}
        self._complete: Recent[Key, deque[LossWindow]] = Recent(MOST_FOLLOWED)
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
        windows = self._complete.of(key, lambda: deque(maxlen=MOST_WINDOWS))
        windows.append(window)
        has_wrapper = bool(event.members)
        scalings = frozenset(self._scalings)
        return LossView(
            event.optimizer,
            RankSet(group),
            tuple(windows),
            has_wrapper,
            self._is_multiplied,
            scalings,
        )


# The aligner.


class LossAligner:
    """Losses of the steps that all ranks have taken, as a part of what is known of models."""

    builds = (LossView, AuxLossView, CombinedLossView, CombinedAuxLossView)

    def __init__(self, job: Job) -> None:
        self._job = job
        self._windows = LossWindows(job.world)
        self._is_read = False
        self._has_aux = False
        self._blind: set[int] = set()

    def gaps(self) -> dict[type[View | Event], Gap]:
        """Say whether no loss was seen, or not all."""
        if self._job.only_start:
            return dict.fromkeys(self.builds, LIGHT)
        if self._blind:
            why = f"the losses of {RankSet(self._blind).phrase()} are not observed wholly"
            return dict.fromkeys(self.builds, NotObserved(why))
        if not self._is_read:
            return dict.fromkeys(self.builds, _NO_LOSS)
        return {} if self._has_aux else dict.fromkeys((AuxLossView, CombinedAuxLossView), _NO_AUX)

    def note(self, view: View) -> None:
        """Take note of what is known of a model."""
        self._windows.note(view)

    def feed(self, event: LossWeights | ProbeDisabled) -> Iterator[View]:
        """Take in one event of one rank."""
        if isinstance(event, ProbeDisabled):
            if event.probe == "losses":
                self._blind.add(event.rank)
            return
        self._is_read = self._is_read or any(event.passes)
        self._has_aux |= any(each.aux for each in event.passes if each is not None)
        view = self._windows.add(event)
        if view is not None:
            yield view
            if has_aux(view.windows):
                yield view.narrowed(AuxLossView)
