"""Puts gradients of all ranks side by side, with the exchanges that their passages made."""

from __future__ import annotations

from typing import Final, NamedTuple

from distdiag.engine.judges import Judges
from distdiag.engine.watch import Watch
from distdiag.event import Collective, Event, ProbeDisabled
from distdiag.gradient_event import GradientSums
from distdiag.gradient_view import GradientLook, GradientView, Ranks
from distdiag.model_event import Basis, ModelPlan, ModelState
from distdiag.ranks import RankSet

_MOST_LOOKS: Final = 8
_MOST_OPEN: Final = 32
_MOST_CALLS: Final = 4096
_REDUCING: Final = ("all_reduce", "reduce_scatter")
_GATHERING: Final = (*_REDUCING, "all_gather")
_UNPLACED: Final = (Basis.WORLD, Basis.REDUCED, Basis.SENT)


class _Told(NamedTuple):
    """What one rank tells of one step, and what it issued in each of its passages."""

    event: GradientSums
    exchanges: tuple[Ranks, ...]
    gathers: tuple[Ranks, ...]


class GradientWatch(Watch):
    """Feed sums as they come; a step is judged when all ranks have told theirs."""

    kinds = (GradientSums, Collective, ModelPlan, ProbeDisabled)

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Watch the gradients of these ranks."""
        self._world = frozenset(world)
        self._judges = judges
        self._calls: dict[int, dict[int, Ranks]] = {rank: {} for rank in world}
        self._gathers: dict[int, dict[int, Ranks]] = {rank: {} for rank in world}
        self._placed: dict[str, set[str]] = {}
        self._groups: set[Ranks] = set()
        self._open: dict[tuple[str, int], dict[int, _Told]] = {}
        self._looks: dict[str, tuple[GradientLook, ...]] = {}
        self._has_exchanged = False
        self._blind: set[int] = set()

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks of gradients, where they saw nothing to judge, and why."""
        codes = {check.code for check in self._judges.needing(GradientSums)}
        if self._blind:
            why = f"the gradients of {RankSet(self._blind).phrase()} are not observed wholly"
        elif not self._has_exchanged:
            why = "no gradient was seen that passes an all-to-all"
            codes -= {check.code for check in self._judges.needing(ModelState)}
        else:
            return {}
        return dict.fromkeys(sorted(codes), why)

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self._note(event)
            case ProbeDisabled(probe="gradient-sums"):
                self._blind.add(event.rank)
            case ModelPlan():
                names = {plan.name for plan in event.tensors if plan.basis not in _UNPLACED}
                self._placed.setdefault(event.model, set()).update(names)
            case GradientSums():
                self._add(event)

    def _note(self, call: Collective) -> None:
        op = call.signature.op
        if op.startswith("all_to_all"):
            _keep(self._calls[call.rank], call)
        elif op.startswith(_GATHERING):
            _keep(self._gathers[call.rank], call)
        if op.startswith(_REDUCING):
            self._groups.add(tuple(sorted(call.group.ranks)))

    def _add(self, event: GradientSums) -> None:
        key = (event.model, event.step)
        exchanges, gathers = (
            tuple(_groups_of(calls[event.rank], *passage.calls) for passage in event.passages)
            for calls in (self._calls, self._gathers)
        )
        self._has_exchanged = self._has_exchanged or any(exchanges)
        by_rank = self._open.setdefault(key, {})
        by_rank[event.rank] = _Told(event, exchanges, gathers)
        if by_rank.keys() >= self._world:
            self._judge(event.model, event.step)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _judge(self, model: str, step: int) -> None:
        found = self._open.pop((model, step))
        look = GradientLook(
            step,
            {rank: told.event for rank, told in sorted(found.items())},
            {rank: told.exchanges for rank, told in found.items()},
            frozenset(self._groups),
            {rank: told.gathers for rank, told in found.items()},
        )
        # The first looks are kept: those that come later are few.
        self._looks[model] = looks = (*self._looks.get(model, ()), look)[:_MOST_LOOKS]
        ranks = RankSet(rank for each in looks for rank in each.by_rank)
        placed = frozenset(self._placed.get(model, ()))
        self._judges.judge_gradients(GradientView(model, ranks, looks, placed))

    def finish(self) -> None:
        """Judge what not all ranks have told."""
        for model, step in list(self._open):
            self._judge(model, step)


def _keep(calls: dict[int, Ranks], call: Collective) -> None:
    calls[call.seq] = tuple(sorted(call.group.ranks))
    if len(calls) > _MOST_CALLS:
        del calls[next(iter(calls))]


def _groups_of(calls: dict[int, Ranks], first: int, last: int) -> Ranks:
    """Return the ranks that the calls with these numbers went over, if it is one group."""
    found = {calls[seq] for seq in range(first, last) if seq in calls}
    return found.pop() if len(found) == 1 else ()
