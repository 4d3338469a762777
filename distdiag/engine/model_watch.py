"""What the engine knows of models, their optimizers and what is saved of them."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.engine.judges import Judges
from distdiag.engine.models import Models
from distdiag.engine.optimizer_steps import OptimizerSteps
from distdiag.engine.slice_saves import SliceSaves
from distdiag.engine.user_plans import UserPlans
from distdiag.event import Event, ProbeDisabled, RankStarted
from distdiag.model_event import ModelPlan, ModelState, OptimizerState, SliceSaved
from distdiag.placement_rule import PlacementRule
from distdiag.plan_event import PlanPatterns
from distdiag.ranks import RankSet

ModelEvent = ModelPlan | ModelState | OptimizerState | SliceSaved | PlanPatterns
KINDS = (ModelPlan, ModelState, OptimizerState, SliceSaved, PlanPatterns)


class ModelWatch:
    """Feed events as they come; what is complete is judged at once, the rest at the end."""

    def __init__(self, world: RankSet, judges: Judges, rules: Sequence[PlacementRule] = ()) -> None:
        """Watch the models of these ranks; `rules` are the user's own plan for them."""
        self._judges = judges
        self._models = Models()
        self._optimizers = OptimizerSteps(world)
        self._saves = SliceSaves()
        self._plans = UserPlans(world, rules)
        self._blind: set[int] = set()
        self._num_ranks = len(world)
        self._sees_all = True

    @property
    def problem(self) -> str:
        """Why not all models were compared, or an empty string."""
        if not self._blind:
            return ""
        return f"the models of {RankSet(self._blind).phrase()} are not observed wholly"

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case ModelPlan() | ModelState():
                for view in self._models.feed(event):
                    self._judges.judge_model(view)
            case OptimizerState():
                alignment = self._optimizers.add(event)
                if alignment is not None:
                    self._judges.judge(alignment)
                if self._plans.has_stepped(event.rank):
                    self._judge_plans()
            case PlanPatterns():
                self._plans.add(event)
            case ProbeDisabled(probe="models"):
                self._blind.add(event.rank)
            case RankStarted():
                self._sees_all = self._sees_all and event.world_size <= self._num_ranks
            case SliceSaved():
                self._saves.add(event)

    def finish(self) -> None:
        """Judge what not all ranks have reached."""
        for alignment in self._optimizers.rest():
            self._judges.judge(alignment)
        for save in self._saves.incomplete():
            self._judges.judge_missing(save)
        self._judge_plans()

    def _judge_plans(self) -> None:
        # Of ranks that nobody sees it is not known what a pattern matches there.
        if self._sees_all and not self._blind:
            for view in self._plans.views(self._models.plans()):
                self._judges.judge_plan(view)
