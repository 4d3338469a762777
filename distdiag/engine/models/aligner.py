"""What the engine knows of models, their optimizers and what is saved of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.config.placement_rules import PlacementRule
from distdiag.engine.aligner import Watch
from distdiag.engine.coverage import KINDS, ModelCoverage
from distdiag.engine.losses.losses import LossWatch
from distdiag.engine.models.models import Models
from distdiag.engine.models.optimizers import OptimizerAlignment, OptimizerSteps, Untrained
from distdiag.engine.models.plans import UserPlans
from distdiag.engine.models.replicas import Apart
from distdiag.engine.runner import Judges
from distdiag.events.base import Event
from distdiag.events.lifecycle import ProbeDisabled, RankStarted
from distdiag.events.losses import LossWeights
from distdiag.events.models import (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    PlanPatterns,
    SliceSaved,
)
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment
from distdiag.views.models import ReplicaView

# Saves of parts of sharded parameters, of all ranks that hold parts.

SaveAlignment = Alignment[SliceSaved]


class SliceSaves:
    """Collect who saved its parts; that some did not is only certain at the end."""

    def __init__(self) -> None:
        """Nothing was saved yet."""
        self._saves: dict[int, SliceSaved] = {}

    def add(self, event: SliceSaved) -> None:
        """Take in one event."""
        self._saves.setdefault(event.rank, event)

    def incomplete(self) -> Iterator[SaveAlignment]:
        """Yield the save, if of no set of ranks that make up the whole all have saved."""
        if not self._saves or any(
            self._saves.keys() >= set(event.members) for event in self._saves.values()
        ):
            return
        first = self._saves[min(self._saves)]
        yield Alignment("save", first.names, self._saves, RankSet(first.members))


# Puts the states of random number generators side by side where they should be equal.

MOST_OPEN: Final = 256

_Event = RandomDraw | RandomState


class RandomStreams:
    """Collect events until all ranks that should agree have told theirs."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._open: dict[tuple[str | int, ...], dict[int, _Event]] = {}
        self._counts: dict[tuple[str | int, ...], int] = {}

    def add(self, event: _Event) -> Iterator[Alignment[_Event]]:
        """Take in one event; yield the alignment that it completes."""
        if len(event.members) < 2:
            return
        key = self._key(event)
        told = self._open.setdefault(key, {})
        told[event.rank] = event
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        if told.keys() >= set(event.members):
            self._open.pop(key, None)
            by_rank = {rank: told[rank] for rank in sorted(event.members)}
            yield Alignment("random", key, by_rank, RankSet(by_rank))

    def _key(self, event: _Event) -> tuple[str | int, ...]:
        if isinstance(event, RandomDraw):
            return "draw", event.number, *event.members
        place: tuple[str | int, ...] = (event.rank, event.moment, event.step, *event.members)
        count = self._counts[place] = self._counts.get(place, -1) + 1
        return "state", count, event.moment, event.step, *event.members


# ---

ModelEvent = (
    ModelPlan
    | ModelState
    | OptimizerState
    | PartialRead
    | SliceSaved
    | PlanPatterns
    | RandomState
    | RandomDraw
    | LossWeights
)


class ModelWatch(Watch):
    """Feed events as they come; what is complete is judged at once, the rest at the end."""

    kinds = (*KINDS, LossWeights, RandomDraw, ProbeDisabled, RankStarted)

    def __init__(
        self,
        world: RankSet,
        judges: Judges,
        rules: Sequence[PlacementRule] = (),
        *,
        only_start: bool = False,
        apart: Apart | None = None,
    ) -> None:
        """Watch the models of these ranks.

        `rules` are the user's own plan for them; `only_start`: the ranks leave the steps out.
        `apart` is told of copies that differ.
        """
        self._judges = judges
        self._apart = apart or Apart(judges)
        self._models = Models(self._apart.siblings)
        self._optimizers = OptimizerSteps(world)
        self._untrained = Untrained()
        self._saves = SliceSaves()
        self._plans = UserPlans(world, rules)
        self._random = RandomStreams()
        self._coverage = ModelCoverage(only_start=only_start)
        self._losses = LossWatch(world, self._judges)
        self._blind: set[int] = set()
        self._num_ranks = len(world)
        self._sees_all = True

    @property
    def not_checked(self) -> dict[str, str]:
        """The codes of the checks that compared nothing, or not all models, and why."""
        checks = {check.code: check for kind in KINDS for check in self._judges.needing(kind)}
        if self._blind:
            reason = f"the models of {RankSet(self._blind).phrase()} are not observed wholly"
            return self._losses.not_checked | dict.fromkeys(checks, reason)
        gaps = {code: self._coverage.gap(type(check)) for code, check in checks.items()}
        return self._losses.not_checked | {code: gap for code, gap in gaps.items() if gap}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        if isinstance(event, ModelEvent):
            self._coverage.saw(event)
        match event:
            case LossWeights():
                self._losses.feed(event)
            case RandomState() | RandomDraw():
                self._feed_random(event)
            case ProbeDisabled():
                self._note_blind(event)
            case ModelPlan() | ModelState():
                self._feed_model(event)
            case OptimizerState():
                self._feed_step(event)
            case PlanPatterns():
                self._plans.add(event)
            case RankStarted():
                self._sees_all = self._sees_all and event.world_size <= self._num_ranks
            case SliceSaved():
                self._saves.add(event)

    def _feed_step(self, event: OptimizerState) -> None:
        self._untrained.add(event)
        self._judge(self._optimizers.add(event))
        if self._plans.has_stepped(event.rank):
            self._judge_plans()

    def _note_blind(self, event: ProbeDisabled) -> None:
        self._losses.feed(event)
        if event.probe == "models":
            self._blind.add(event.rank)

    def _feed_model(self, event: ModelPlan | ModelState) -> None:
        for view in self._models.feed(event):
            self._coverage.compared(type(view))
            self._judges.judge_model(view)
            self._losses.note(view)
            if isinstance(view, ReplicaView):
                self._apart.note(view)
        for moment in self._models.compared:
            self._coverage.compared(moment)

    def _feed_random(self, event: RandomState | RandomDraw) -> None:
        for alignment in self._random.add(event):
            self._coverage.compared(RandomState)
            self._judges.judge(alignment)

    def finish(self) -> None:
        """Judge what not all ranks have reached."""
        for alignment in self._optimizers.rest():
            self._judge(alignment)
        for view in self._untrained.views(self._models.plans_of):
            self._judges.judge_model(view)
        for save in self._saves.incomplete():
            self._judges.judge_missing(save)
        self._judge_plans()

    def _judge_plans(self) -> None:
        # Of ranks that nobody sees it is not known what a pattern matches there.
        if self._sees_all and not self._blind:
            for view in self._plans.views(self._models.plans()):
                self._coverage.compared(PlanPatterns)
                self._judges.judge_plan(view)

    def _judge(self, alignment: OptimizerAlignment | None) -> None:
        if alignment is not None:
            self._coverage.compared(OptimizerState)
            self._judges.judge(alignment)
