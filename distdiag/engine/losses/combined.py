"""Shows losses with what measured gradients tell: over which ranks they were combined, and how."""

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from distdiag.engine.aligner import Aligner, Job
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import Event
from distdiag.events.collectives import Collective
from distdiag.events.gradients import GradientSums
from distdiag.events.losses import LossWeights
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import SequenceUse
from distdiag.views.base import View
from distdiag.views.gradients import Combined, GradientSample, Ranks, copied_on
from distdiag.views.losses import CombinedAuxLossView, CombinedLossView, LossWindow, has_aux
from distdiag.views.sequences import SequenceView

_MOST_OPEN: Final = 64
_MOST_WINDOWS: Final = 16
_REDUCING: Final = ("all_reduce", "reduce_scatter")
_WHOLE: Final = 0.003
"""A measured divisor is a whole number but for so much rounding."""

Key = tuple[str, Ranks, bool]
"""An optimizer, the ranks that combine gradients, and whether that is measured."""
E = TypeVar("E", bound=Event)
_OfStep = dict[int, E | None]
"""What ranks have reported of one step; None if one has reported several things."""
_Told = dict[int, _OfStep[E]]


class CombinedLossAligner(Aligner):
    """Losses beside measured gradients; a step is shown when both of all ranks are there.

    A step is left out where a rank steps several optimizers, or trains several models, since it is
    not known then which gradients a loss has.
    """

    needs = (LossWeights, GradientSums, SequenceUse, Collective)
    builds = (CombinedLossView, CombinedAuxLossView)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._world = frozenset(job.world)
        self._groups: set[Ranks] = set()
        self._losses: _Told[LossWeights] = {}
        self._sums: _Told[GradientSums] = {}
        self._uses = SideBySide(job.world)
        self._sequences: dict[tuple[str, Ranks], SequenceView] = {}
        self._windows: Recent[Key, deque[LossWindow]]
        self._windows = Recent(MOST_FOLLOWED, "losses beside gradients", job.forgotten)

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case LossWeights() | GradientSums():
                known: _Told[Any] = self._losses if isinstance(event, LossWeights) else self._sums
                of_step = known.setdefault(event.step, {})
                of_step[event.rank] = None if event.rank in of_step else event
                if self._is_reported(event.step):
                    yield from self._views(before=event.step)
            case SequenceUse():
                self._feed_use(event)
            case Collective():
                if event.signature.op.startswith(_REDUCING):
                    self._groups.add(tuple(sorted(event.group.ranks)))

    def end(self) -> Iterator[View]:
        """Show what is known once more: who shares sequences may be known only now."""
        yield from self._views(before=sys.maxsize)
        for key in self._windows:
            yield from self._view(key)

    def _feed_use(self, event: SequenceUse) -> None:
        alignment = self._uses.add(event)
        if alignment is not None:
            ranks = RankSet(event.members)
            view = SequenceView(event.how, ranks, (alignment.by_rank,))
            self._sequences[event.how, event.members] = view

    def _views(self, before: int) -> Iterator[View]:
        """Show earlier steps: no more comes of those whose next one all have reported."""
        for step in [step for step in self._losses if step < before and self._is_reported(step)]:
            yield from self._take(step, self._losses.pop(step), self._sums.pop(step))
        for known in (self._losses, self._sums):
            for step in sorted(known)[:-_MOST_OPEN]:
                del known[step]

    def _is_reported(self, step: int) -> bool:
        known = (self._losses, self._sums)
        return all(each.get(step, {}).keys() >= self._world for each in known)

    def _take(
        self, step: int, losses: _OfStep[LossWeights], sums: _OfStep[GradientSums]
    ) -> Iterator[View]:
        given = {rank: event for rank, event in losses.items() if event is not None}
        if len(given) < len(losses) or len({each.optimizer for each in given.values()}) != 1:
            return
        is_measured = not any(each.divisor for each in given.values())
        if is_measured:
            given = self._measured(step, given, sums)
        for members in sorted({each.members for each in given.values()}):
            group = {rank: given[rank] for rank in members if rank in given}
            if members and all(group.get(r) and group[r].members == members for r in members):
                key = (group[members[0]].optimizer, members, is_measured)
                windows = self._windows.of(key, lambda: deque(maxlen=_MOST_WINDOWS))
                windows.append(LossWindow(step, group))
                yield from self._view(key)

    def _measured(
        self, step: int, given: dict[int, LossWeights], sums: _OfStep[GradientSums]
    ) -> dict[int, LossWeights]:
        """Return the losses of ranks of which it is clear how their gradients are combined."""
        by_rank = {rank: each for rank, each in sums.items() if each is not None}
        if len(by_rank) < len(sums):
            return {}
        sample = GradientSample(step, by_rank, {}, frozenset(self._groups))
        found = {rank: copied_on(sample, rank) for rank in by_rank}
        return {r: _with(given[r], each) for r, each in found.items() if each is not None}

    def _view(self, key: Key) -> Iterator[View]:
        optimizer, members, is_measured = key
        sequences = tuple(self._sequences.values())
        if is_measured or sequences:
            view = CombinedLossView(
                optimizer,
                RankSet(members),
                tuple(self._windows[key]),
                sequences=sequences,
                is_measured=is_measured,
            )
            yield view
            if has_aux(view.windows):
                yield view.narrowed(CombinedAuxLossView)


def _with(event: LossWeights, combined: Combined) -> LossWeights:
    members, divisor = combined
    if abs(divisor - round(divisor)) <= _WHOLE * divisor:
        divisor = float(round(divisor))
    return msgspec.structs.replace(event, members=members, divisor=divisor)
