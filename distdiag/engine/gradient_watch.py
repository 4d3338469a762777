"""Puts gradients of all ranks side by side, with the exchanges that their passages made."""

from __future__ import annotations

from typing import Final

from distdiag.engine.judges import Judges
from distdiag.engine.watch import Watch
from distdiag.event import Collective, Event, ProbeDisabled
from distdiag.gradient_event import GradientSums
from distdiag.gradient_view import GradientLook, GradientView, Ranks
from distdiag.ranks import RankSet

_MOST_LOOKS: Final = 8
_MOST_OPEN: Final = 32
_MOST_CALLS: Final = 4096
_REDUCING: Final = ("all_reduce", "reduce_scatter")


class GradientWatch(Watch):
    """Feed sums as they come; a step is judged when all ranks have told theirs."""

    kinds = (GradientSums, Collective, ProbeDisabled)

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Watch the gradients of these ranks."""
        self._world = frozenset(world)
        self._judges = judges
        self._calls: dict[int, dict[int, Ranks]] = {rank: {} for rank in world}
        self._groups: set[Ranks] = set()
        self._open: dict[tuple[str, int], dict[int, tuple[GradientSums, tuple[Ranks, ...]]]] = {}
        self._looks: dict[str, tuple[GradientLook, ...]] = {}
        self._has_exchanged = False
        self._blind: set[int] = set()

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks of gradients, where they saw nothing to judge, and why."""
        if self._blind:
            why = f"the gradients of {RankSet(self._blind).phrase()} are not observed wholly"
        elif not self._has_exchanged:
            why = "no gradient was seen that passes an all-to-all"
        else:
            return {}
        return {check.code: why for check in self._judges.needing(GradientSums)}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self._note(event)
            case ProbeDisabled(probe="gradient-sums"):
                self._blind.add(event.rank)
            case GradientSums():
                self._add(event)

    def _note(self, call: Collective) -> None:
        op = call.signature.op
        if op.startswith("all_to_all"):
            calls = self._calls[call.rank]
            calls[call.seq] = call.group.ranks
            if len(calls) > _MOST_CALLS:
                del calls[next(iter(calls))]
        elif op.startswith(_REDUCING):
            self._groups.add(tuple(sorted(call.group.ranks)))

    def _add(self, event: GradientSums) -> None:
        key = (event.model, event.step)
        exchanges = tuple(self._exchanged(event.rank, *passage.calls) for passage in event.passages)
        self._has_exchanged = self._has_exchanged or any(exchanges)
        by_rank = self._open.setdefault(key, {})
        by_rank[event.rank] = (event, exchanges)
        if by_rank.keys() >= self._world:
            self._judge(event.model, event.step)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _exchanged(self, rank: int, first: int, last: int) -> Ranks:
        calls = self._calls[rank]
        found = {tuple(sorted(calls[seq])) for seq in range(first, last) if seq in calls}
        return found.pop() if len(found) == 1 else ()

    def _judge(self, model: str, step: int) -> None:
        found = self._open.pop((model, step))
        look = GradientLook(
            step,
            {rank: event for rank, (event, _) in sorted(found.items())},
            {rank: exchanges for rank, (_, exchanges) in found.items()},
            frozenset(self._groups),
        )
        # The first looks are kept: those that come later are few.
        self._looks[model] = looks = (*self._looks.get(model, ()), look)[:_MOST_LOOKS]
        ranks = RankSet(rank for each in looks for rank in each.by_rank)
        self._judges.judge_gradients(GradientView(model, ranks, looks))

    def finish(self) -> None:
        """Judge what not all ranks have told."""
        for model, step in list(self._open):
            self._judge(model, step)
