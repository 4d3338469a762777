"""Shows the losses of all ranks to the checks, and knows whether there were any."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Final

from distdiag.engine.aligner import LIGHT, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective
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


_SAME: Final = 1e-3
"""The largest gradient of each tensor is compared: rounding may move it by less, in 16 bits too if
it is multiplied by a power of two, and by an all-reduce of copies it is exact."""
_ENOUGH: Final = 0.5
"""Of the gradients that were added up, some may be left out: frozen ones, or those of one group."""


class SumsOfCopies:
    """Recognise gradients that the program adds up though a wrapper has averaged them.

    All ranks hold the same then: the sum multiplies by their number.
    """

    def __init__(self) -> None:
        self._summed: Recent[int, dict[tuple[int, RankSet], tuple[int, CallSite]]]
        self._summed = Recent(MOST_FOLLOWED)
        self.steps: dict[RankSet, dict[int, CallSite]] = {}

    def add(self, call: Collective) -> None:
        """Take note of a sum that the program asks for; those of wrappers are none of its own."""
        signature = call.signature
        if signature.op == "all_reduce" and signature.reduce_op == "SUM":
            of_step = self._summed.of(call.step, dict)
            key = call.rank, RankSet(call.group.ranks)
            before, site = of_step.get(key, (0, call.site))
            number = sum(math.prod(size) for size in signature.input_sizes)
            of_step[key] = before + number, site

    def note(self, view: ScalingView) -> None:
        """Take note of a step whose gradients became larger by the number of ranks."""
        ranks, of_step = RankSet(view.by_rank), self._summed.get(view.step, {})
        is_larger = all(abs(f / len(ranks) - 1) <= _SAME for f in view.by_rank.values())
        sums = [of_step.get((rank, ranks), (0, CallSite(()))) for rank in ranks]
        is_summed = all(number >= _ENOUGH * view.num_elements for number, _ in sums)
        if len(ranks) > 1 and view.num_elements and is_larger and is_summed:
            steps = self.steps.setdefault(ranks, {})
            if len(steps) < MOST_WINDOWS:
                steps[view.step] = sums[0][1]


class LossWindows:
    """Collect the passes of each step until all ranks that combine gradients have reported."""

    def __init__(self, world: RankSet) -> None:
        self._world = tuple(world)
        self._open: dict[tuple[Key, int], dict[int, LossWeights]] = {}
        self._complete: Recent[Key, deque[LossWindow]] = Recent(MOST_FOLLOWED)
        self._is_multiplied = False
        self._scalings: set[float] = set()
        self._sums = SumsOfCopies()

    def hear(self, call: Collective) -> None:
        """Take note of what the program adds up."""
        self._sums.add(call)

    def note(self, view: View) -> None:
        """Take note of gradients that were multiplied before a step."""
        if not isinstance(view, ScalingView):
            return
        if max(view.by_rank.values()) > _MORE:
            self._is_multiplied = True
        if len(self._scalings) < MOST_OPEN:
            self._scalings.update(view.by_rank.values())
        self._sums.note(view)

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
        resummed = self._sums.steps.get(RankSet(group), {}) if has_wrapper else {}
        return LossView(
            event.optimizer,
            RankSet(group),
            tuple(windows),
            has_wrapper,
            self._is_multiplied,
            scalings,
            resummed=tuple(resummed),
            sum_site=next(iter(resummed.values()), None),
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

    def feed(self, event: LossWeights | ProbeDisabled | Collective) -> Iterator[View]:
        """Take in one event of one rank."""
        if isinstance(event, Collective):
            self._windows.hear(event)
            return
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
