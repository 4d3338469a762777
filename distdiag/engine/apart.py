"""Copies that drift apart, and whether anything ever passes between their ranks that mends it.

Steps on gradients of one's own may be meant: weights are averaged now and then, or a compressed
change is sent round. Whoever means them sends something of the size of the model sooner or later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from distdiag.engine.judges import Judges
from distdiag.engine.rank_tracker import RECORDS_OF_CALLS
from distdiag.engine.siblings import Siblings
from distdiag.engine.traffic import Traffic, element_bytes
from distdiag.engine.watch import Watch
from distdiag.event import Collective, Event, Finished, GroupCreated, ProbeDisabled, StepEnd
from distdiag.model_event import Basis, Moment
from distdiag.model_view import ReplicaView

FIRST_STEPS: Final = 3
FEWEST_STEPS: Final = 4
"""A run that is over after fewer steps tells nothing."""

PATIENCE: Final = {Basis.UNSYNCED: 2000, Basis.SIBLING: 100}
"""After so many steps without a word between them the ranks are judged while they train."""

_SMALL: Final = 32
"""Less than this part of the tensors, in one step, is no average or change of them."""


@dataclass(slots=True)
class _Pending:
    """Ranks whose gradients differed in one of their first steps."""

    view: ReplicaView
    ranks: frozenset[int]
    has_drifted: bool
    is_judged: bool = False

    @property
    def num_bytes(self) -> int:
        """How large the tensors are that differ."""
        return sum(
            next(iter(tensor.by_rank.values())).num_elements * element_bytes(tensor.plan.dtype)
            for tensor in self.view.tensors
        )


class Apart(Watch):
    """Judges copies whose ranks have told one another nothing, after many steps or at the end."""

    kinds = (Collective, Finished, GroupCreated, ProbeDisabled, StepEnd)

    def __init__(self, judges: Judges) -> None:
        """Know of no copies that differ."""
        self.siblings = Siblings()
        self._judges = judges
        self._traffic = Traffic()
        self._pending: dict[tuple[str, Basis, frozenset[int]], _Pending] = {}
        self._steps: dict[int, int] = {}
        self._finished: set[int] = set()
        self._is_blind = False

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self.siblings.feed_call(event)
                self._traffic.add(event)
            case StepEnd():
                self._steps[event.rank] = event.step + 1
                self._judge(is_over=False)
            case GroupCreated():
                self.siblings.feed_group(event)
            case Finished(exit_status=0):
                self._finished.add(event.rank)
            case ProbeDisabled() if event.probe in RECORDS_OF_CALLS:
                self._is_blind = True

    def note(self, view: ReplicaView) -> None:
        """Take note of copies that differ, if they were the same and nothing tells why."""
        if view.basis not in PATIENCE or view.alike_at is None:
            return
        key = (view.model, view.basis, frozenset(view.ranks))
        known = self._pending.get(key)
        if view.moment is Moment.STEP and known is not None:
            known.has_drifted = True
        elif view.moment is Moment.GRADIENT and known is None and view.step < FIRST_STEPS:
            is_told = view.basis is Basis.SIBLING
            self._pending[key] = _Pending(view, frozenset(view.ranks), is_told)

    def finish(self) -> None:
        """Judge, at the end, what ran to its end."""
        self._judge(is_over=True)

    def _judge(self, *, is_over: bool) -> None:
        if self._is_blind:
            return
        for pending in self._pending.values():
            if pending.is_judged or not pending.has_drifted:
                continue
            num_steps = min(self._steps.get(rank, 0) for rank in pending.ranks)
            is_late = num_steps >= PATIENCE[pending.view.basis]
            is_whole = is_over and pending.ranks <= self._finished and num_steps >= FEWEST_STEPS
            if not (is_late or is_whole):
                continue
            pending.is_judged = True
            if not self._have_met(pending):
                self._judges.judge_model(replace(pending.view, apart_for=num_steps))

    def _have_met(self, pending: _Pending) -> bool:
        most, total = self._traffic.between(pending.ranks)
        return most * _SMALL >= pending.num_bytes or total >= pending.num_bytes
