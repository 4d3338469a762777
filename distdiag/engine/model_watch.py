"""What the engine knows of models, their optimizers and what is saved of them."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.engine.apart import Apart
from distdiag.engine.judges import Judges
from distdiag.engine.loss_watch import LossWatch
from distdiag.engine.model_coverage import KINDS, ModelCoverage
from distdiag.engine.models import Models
from distdiag.engine.optimizer_steps import OptimizerAlignment, OptimizerSteps
from distdiag.engine.random_states import RandomStreams
from distdiag.engine.slice_saves import SliceSaves
from distdiag.engine.untrained import Untrained
from distdiag.engine.user_plans import UserPlans
from distdiag.engine.watch import Watch
from distdiag.event import Event, ProbeDisabled, RankStarted
from distdiag.loss_event import LossWeights
from distdiag.model_event import (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    SliceSaved,
)
from distdiag.model_view import ReplicaView
from distdiag.placement_rule import PlacementRule
from distdiag.plan_event import PlanPatterns
from distdiag.random_event import RandomDraw, RandomState
from distdiag.ranks import RankSet

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
