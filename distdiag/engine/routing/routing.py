"""Puts choices of experts side by side: those of a repeated pass, and those of other ranks."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import MOST_FOLLOWED, SinceFirst
from distdiag.events.base import Event
from distdiag.events.lifecycle import Finished, ProbeDisabled, StepEnd
from distdiag.events.ranks import RankSet
from distdiag.events.routing import AuxLoss, CounterWritten, CountsHeld, Routing
from distdiag.views.base import View
from distdiag.views.routing import (
    AuxLossRouting,
    Divergence,
    Recount,
    RepeatedRouting,
    Rerouting,
    RoutingView,
)

_MOST_KEPT: Final = 256
_MOST_SAMPLES: Final = 64
_LAG: Final = 2
"""So many steps later what a device has computed is written down, too."""

Key = tuple[object, ...]

_NO_CHOICE: Final = NothingThere("experts", "no choice of experts was seen")
_NO_REPEAT: Final = NothingThere(
    "experts", "no choice of experts was repeated by activation checkpointing"
)
_NO_AUX: Final = NothingThere("experts", "no auxiliary (load-balancing) loss was seen")


@dataclass(slots=True)
class _Known:
    """What is known of one model."""

    steps: dict[int, dict[int, list[Routing]]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    reroutings: list[Rerouting] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    choices: deque[Routing] = field(default_factory=lambda: deque(maxlen=4 * _MOST_KEPT))
    counters: dict[int, dict[int, list[CounterWritten]]] = field(default_factory=dict)
    recounts: list[Recount] = field(default_factory=list)
    aux: dict[tuple[str, int], deque[AuxLoss]] = field(default_factory=dict)
    used: dict[str, AuxLoss] = field(default_factory=dict)
    num_repeated: int = 0
    num_compared: int = 0
    is_repeated: bool = False

    @property
    def has_aux(self) -> bool:
        """Whether a module that routes computed an auxiliary loss."""
        return bool(self.aux or self.used)


class RoutingAligner(Aligner):
    """Choices of experts; a step is shown when all ranks have gone on."""

    needs = (Routing, CounterWritten, AuxLoss, StepEnd, Finished, ProbeDisabled)
    builds = (RoutingView, RepeatedRouting, AuxLossRouting, CountsHeld)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._models: SinceFirst[str, _Known]
        self._models = SinceFirst(MOST_FOLLOWED, "models with experts", job.forgotten)
        self._reached: dict[int, int] = dict.fromkeys(job.world, 0)
        self._finished: set[int] = set()
        self._blind: set[int] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say what of routing was never there."""
        if self._blind:
            why = f"the routing of {RankSet(self._blind).phrase()} is not observed wholly"
            return dict.fromkeys(self.builds, NotObserved(why))
        gaps: dict[type[View | Event], Gap] = {}
        if not self._models:
            gaps |= dict.fromkeys(self.builds, _NO_CHOICE)
        elif not any(known.is_repeated for known in self._models.values()):
            gaps[RepeatedRouting] = _NO_REPEAT
        if self.job.only_start:
            gaps[AuxLossRouting] = LIGHT
        elif self._models and not any(known.has_aux for known in self._models.values()):
            gaps[AuxLossRouting] = _NO_AUX
        return gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case ProbeDisabled(probe="routing"):
                self._blind.add(event.rank)
            case Routing() | CounterWritten() | AuxLoss():
                known = self._models.find(event.model, _Known)
                if known is not None:
                    known.ranks.add(event.rank)
                    _take_in(known, event)
            case StepEnd():
                self._reached[event.rank] = event.step
                if self._models:
                    yield from self._show_until(min(self._reached.values()) - _LAG)
            case Finished(exit_status=0):
                self._finished.add(event.rank)

    def end(self) -> Iterator[View]:
        """Show all that is left."""
        yield from self._show_until(None)

    def _show_until(self, last: int | None) -> Iterator[View]:
        for name, known in self._models.items():
            steps = known.steps.keys() | known.counters.keys()
            ripe = [step for step in steps if last is None or step <= last]
            for step in sorted(ripe):
                self._take(known, known.steps.pop(step, {}))
                for counters in known.counters.pop(step, {}).values():
                    known.recounts.extend(_recounts(counters))
                del known.recounts[_MOST_KEPT:]
            if ripe or (last is None and known.aux):
                num_steps = self._num_steps(known.ranks) if last is None else 0
                view = _view(name, known, num_steps)
                yield view
                if known.is_repeated:
                    yield view.narrowed(RepeatedRouting)
                if known.has_aux:
                    yield view.narrowed(AuxLossRouting)

    def _num_steps(self, ranks: set[int]) -> int:
        """Return how many steps ranks took that ran to their end, 0 if some did not."""
        return min(self._reached[r] for r in ranks) + 1 if ranks <= self._finished else 0

    def _take(self, known: _Known, by_rank: dict[int, list[Routing]]) -> None:
        for events in by_rank.values():
            known.num_repeated += sum(event.is_recompute for event in events)
            known.reroutings.extend(_reroutings(events))
            last = {(e.layer, e.number): e for e in events if not e.is_recompute}
            known.choices.extend(last.values())
        first = [e for events in by_rank.values() for e in events if not e.is_recompute]
        for divergence in _alike(first):
            known.num_compared += 1
            if len({event.chosen for event in divergence.by_rank.values()}) > 1:
                known.divergences.append(divergence)
        del known.reroutings[_MOST_KEPT:], known.divergences[_MOST_KEPT:]


def _take_in(known: _Known, event: Routing | CounterWritten | AuxLoss) -> None:
    if isinstance(event, AuxLoss):
        _keep(known, event)
        return
    known.is_repeated |= event.is_recompute
    if isinstance(event, Routing):
        known.steps.setdefault(event.step, {}).setdefault(event.rank, []).append(event)
    else:
        known.counters.setdefault(event.step, {}).setdefault(event.rank, []).append(event)


def _keep(known: _Known, event: AuxLoss) -> None:
    """Keep the samples of an auxiliary loss until it is used."""
    if event.num_used:
        known.used.setdefault(event.layer, event)
        for place in [place for place in known.aux if place[0] == event.layer]:
            del known.aux[place]
    if event.layer not in known.used:
        place = (event.layer, event.rank)
        known.aux.setdefault(place, deque(maxlen=_MOST_SAMPLES)).append(event)


def _view(name: str, known: _Known, num_steps: int) -> RoutingView:
    return RoutingView(
        model=name,
        ranks=RankSet(known.ranks),
        reroutings=tuple(known.reroutings),
        num_repeated=known.num_repeated,
        divergences=tuple(known.divergences),
        num_compared=known.num_compared,
        choices=tuple(known.choices),
        recounts=tuple(known.recounts),
        aux=(*known.used.values(), *(event for aux in known.aux.values() for event in aux)),
        num_steps=num_steps,
    )


def _reroutings(events: Sequence[Routing]) -> Iterator[Rerouting]:
    """Yield the repeated choices of one rank and step that no first pass made.

    Which repeated pass belongs to which first one is not known: where more were repeated than were
    seen at first, nothing is said.
    """
    first: dict[Key, list[Routing]] = {}
    repeated: dict[Key, list[Routing]] = {}
    for event in events:
        place: Key = (event.layer, event.number, event.choice)
        (repeated if event.is_recompute else first).setdefault(place, []).append(event)
    for place, again in repeated.items():
        before = first.get(place, [])
        known = {event.chosen for event in before}
        if not before or len(again) > len(before) or "" in known:
            continue
        for event in again:
            if event.chosen and event.chosen not in known:
                yield Rerouting(event, tuple(before))


def _recounts(events: Sequence[CounterWritten]) -> Iterator[Recount]:
    """Yield the counters of one rank and step that repeated passes have changed once more."""
    first: dict[Key, list[CounterWritten]] = {}
    repeated: dict[Key, list[CounterWritten]] = {}
    for event in events:
        place: Key = (event.layer, event.name)
        (repeated if event.is_recompute else first).setdefault(place, []).append(event)
    for place, again in repeated.items():
        before = first.get(place, [])
        known = {event.after for event in before}
        if not before or len(again) > len(before) or "" in known:
            continue
        for event in again:
            if event.after and event.after not in known:
                yield Recount(event, tuple(before))


def _alike(events: Sequence[Routing]) -> Iterator[Divergence]:
    """Yield the choices that ranks made for the same tokens."""
    groups: dict[Key, dict[int, Routing]] = {}
    for e in events:
        if e.given and e.chosen and e.choice.num_tokens and not e.is_random:
            group: Key = (e.layer, e.call, e.number, e.choice, e.given, e.members)
            groups.setdefault(group, {}).setdefault(e.rank, e)
    for by_rank in groups.values():
        if len(by_rank) > 1:
            yield Divergence(dict(sorted(by_rank.items())))
