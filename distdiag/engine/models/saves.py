"""Puts side by side what ranks give to one distributed checkpoint as plain tensors."""

from collections.abc import Iterator, Mapping, Set
from typing import Final

from distdiag.checks.ckp.overwritten_weights import SavedWeightsView
from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.engine.models.models import RankModels
from distdiag.events.base import Event
from distdiag.events.checkpoints import SavedWeight, WeightsSaved
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import Content, ModelPlan, ModelState, Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

_NO_SAVE: Final = NothingThere(
    "checkpoints", "no weights were given to a distributed checkpoint as plain tensors"
)
_STARTED_APART: Final = "these ranks began with different values of it"
_FORGOTTEN: Final = "what ranks began with is not known any more"
_DECLARED_OWN: Final = "the program says that each rank has its own"

_Start = dict[str, tuple[Content, bool]]
"""By parameter: what it held at first, and whether it was declared the rank's own."""
_Starts = dict[str, _Start]
"""The same of the newest models, by their names."""


class SavedWeightsAligner(Aligner):
    """Shows a save when all ranks that take part have come to it."""

    needs = (WeightsSaved, ModelPlan, ModelState, ProbeDisabled)
    builds = (SavedWeightsView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._parts: dict[int, RankModels] = {}
        self._starts: dict[int, Recent[str, _Start]] = {}
        self._open: Recent[tuple[int, ...], dict[int, tuple[WeightsSaved, _Starts]]]
        self._open = Recent(MOST_FOLLOWED, "saves of weights", job.forgotten)
        self._blind: set[int] = set()
        self._has_seen = False

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was no such save, or not all of it was seen."""
        if self._blind:
            why = f"what {RankSet(self._blind).phrase()} trained and saved is not observed wholly"
            return {SavedWeightsView: NotObserved(why)}
        return {} if self._has_seen else {SavedWeightsView: _NO_SAVE}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case ProbeDisabled(probe="models" | "rank-states"):
                self._blind.add(event.rank)
            case ModelPlan():
                self._parts.setdefault(event.rank, RankModels()).add_plan(event)
            case ModelState(moment=Moment.START):
                self._feed_start(event)
            case WeightsSaved():
                by_rank = self._open.of((event.number, *event.members), dict)
                # Models that this rank has begun since are none that it saved.
                by_rank[event.rank] = event, dict(self._starts.get(event.rank, {}))
                if by_rank.keys() >= set(event.members):
                    self._has_seen = True
                    del self._open[event.number, *event.members]
                    saves = {rank: by_rank[rank][0] for rank in sorted(by_rank)}
                    starts = [each for _, each in by_rank.values()]
                    yield SavedWeightsView(saves, _own(saves, starts))

    def _feed_start(self, event: ModelState) -> None:
        parts = self._parts.setdefault(event.rank, RankModels())
        complete = parts.add_state(event)
        if complete is not None:
            plans = parts.plan_of(event.model)
            starts = self._starts.setdefault(event.rank, Recent(MOST_FOLLOWED))
            starts.pop(event.model, None)
            starts[event.model] = {
                plan.name: (
                    content,
                    plan.is_ignored or plan.evidence is ReplicaEvidence.OWN,
                )
                for plan, content in zip(plans, complete[1], strict=True)
                if content is not None and plan.is_parameter
            }
            starts.shrink()


def _own(saves: Mapping[int, WeightsSaved], starts: list[_Starts]) -> dict[str, str]:
    weights = {weight.key: weight for event in saves.values() for weight in event.weights}
    reasons = {key: _reason(weight, starts) for key, weight in weights.items()}
    return {key: reason for key, reason in reasons.items() if reason}


def _reason(weight: SavedWeight, starts: list[_Starts]) -> str:
    """Say how it is known that ranks have parameters of their own under a key; empty: it is not."""
    is_full = any(len(start) >= MOST_FOLLOWED for start in starts)
    if weight.model:
        if is_full and not all(weight.model in start for start in starts):
            return _FORGOTTEN
        held = [start.get(weight.model, {}).get(weight.name) for start in starts]
        return _reason_of([each for each in held if each is not None])
    # The key of a copy has the name at its end, below those of dicts and wrappers.
    parts = weight.key.split(".")
    names = [".".join(parts[first:]) for first in range(len(parts))]
    models: Set[str] = set.union(*(set(start) for start in starts))
    reasons = set()
    for model in models:
        name = next((n for n in names if any(n in s.get(model, {}) for s in starts)), None)
        if name is not None:
            held = [s.get(model, {}).get(name) for s in starts]
            reasons.add(_reason_of([each for each in held if each is not None]))
    # Of several models with this name the key does not tell which one is meant.
    if not reasons and is_full:
        return _FORGOTTEN
    return reasons.pop() if len(reasons) == 1 else ""


def _reason_of(held: list[tuple[Content, bool]]) -> str:
    if len({content.digest for content, _ in held}) > 1:
        return _STARTED_APART
    return _DECLARED_OWN if len(held) > 1 and all(is_own for _, is_own in held) else ""
