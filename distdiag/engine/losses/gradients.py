"""Puts gradients of all ranks side by side, with the exchanges that their autograd nodes made."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.events.base import Event
from distdiag.events.collectives import Collective
from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import ModelPlan, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.gradients import GradientSample, GradientView, Ranks

_NO_EXCHANGE: Final = NothingThere("experts", "no gradient was seen that passes an all-to-all")
_MOST_SAMPLES: Final = 8
_MOST_OPEN: Final = 32
_MOST_CALLS: Final = 4096
_REDUCING: Final = ("all_reduce", "reduce_scatter")
_GATHERING: Final = (*_REDUCING, "all_gather")
_UNPLACED: Final = (ReplicaEvidence.WORLD, ReplicaEvidence.REDUCED, ReplicaEvidence.SENT)


class _Told(NamedTuple):
    """What one rank tells of one step, and what it issued in each of its nodes."""

    event: GradientSums
    exchanges: tuple[Ranks, ...]
    gathers: tuple[Ranks, ...]


class GradientAligner(Aligner):
    """Sums over gradients; a step is shown when those of all ranks are there."""

    needs = (GradientSums, Collective, ModelPlan, ProbeDisabled)
    builds = (GradientView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._world = frozenset(job.world)
        self._calls: dict[int, dict[int, Ranks]] = {rank: {} for rank in job.world}
        self._gathers: dict[int, dict[int, Ranks]] = {rank: {} for rank in job.world}
        self._placed: dict[str, set[str]] = {}
        self._groups: set[Ranks] = set()
        self._open: dict[tuple[str, int], dict[int, _Told]] = {}
        self._samples: dict[str, tuple[GradientSample, ...]] = {}
        self._has_exchanged = False
        self._blind: set[int] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether no gradient was seen behind an all-to-all, or not all."""
        if self.job.only_start:
            return {GradientView: LIGHT}
        if self._blind:
            why = f"the gradients of {RankSet(self._blind).phrase()} are not observed wholly"
            return {GradientView: NotObserved(why)}
        return {} if self._has_exchanged else {GradientView: _NO_EXCHANGE}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self._note(event)
            case ProbeDisabled(probe="gradient-sums"):
                self._blind.add(event.rank)
            case ModelPlan():
                names = {plan.name for plan in event.tensors if plan.evidence not in _UNPLACED}
                self._placed.setdefault(event.model, set()).update(names)
            case GradientSums():
                yield from self._add(event)

    def _note(self, call: Collective) -> None:
        op = call.signature.op
        if op.startswith("all_to_all"):
            _keep(self._calls[call.rank], call)
        elif op.startswith(_GATHERING):
            _keep(self._gathers[call.rank], call)
        if op.startswith(_REDUCING):
            self._groups.add(tuple(sorted(call.group.ranks)))

    def _add(self, event: GradientSums) -> Iterator[View]:
        key = (event.model, event.step)
        exchanges, gathers = (
            tuple(_groups_of(calls[event.rank], *node.calls) for node in event.nodes)
            for calls in (self._calls, self._gathers)
        )
        self._has_exchanged = self._has_exchanged or any(exchanges)
        by_rank = self._open.setdefault(key, {})
        by_rank[event.rank] = _Told(event, exchanges, gathers)
        if by_rank.keys() >= self._world:
            yield self._view(event.model, event.step)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _view(self, model: str, step: int) -> GradientView:
        found = self._open.pop((model, step))
        sample = GradientSample(
            step,
            {rank: seen.event for rank, seen in sorted(found.items())},
            {rank: seen.exchanges for rank, seen in found.items()},
            frozenset(self._groups),
            {rank: seen.gathers for rank, seen in found.items()},
        )
        # The first samples are kept: those that come later are few.
        self._samples[model] = samples = (*self._samples.get(model, ()), sample)[:_MOST_SAMPLES]
        ranks = RankSet(rank for each in samples for rank in each.by_rank)
        placed = frozenset(self._placed.get(model, ()))
        return GradientView(model, ranks, samples, placed)

    def end(self) -> Iterator[View]:
        """Show what not all ranks have reached."""
        for model, step in list(self._open):
            yield self._view(model, step)


def _keep(calls: dict[int, Ranks], call: Collective) -> None:
    calls[call.seq] = tuple(sorted(call.group.ranks))
    if len(calls) > _MOST_CALLS:
        del calls[next(iter(calls))]


def _groups_of(calls: dict[int, Ranks], first: int, last: int) -> Ranks:
    """Return the ranks that the calls with these numbers went over, if it is one group."""
    found = {calls[seq] for seq in range(first, last) if seq in calls}
    return found.pop() if len(found) == 1 else ()
