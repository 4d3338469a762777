"""What the engine knows of models, their optimizers and what is saved of them."""

from __future__ import annotations

from distdiag.engine.judges import Judges
from distdiag.engine.loss_windows import LossWindows
from distdiag.engine.models import Models
from distdiag.engine.optimizer_steps import OptimizerSteps
from distdiag.engine.slice_saves import SliceSaves
from distdiag.event import Event, ProbeDisabled
from distdiag.loss_event import LossWeights
from distdiag.model_event import ModelPlan, ModelState, OptimizerState, SliceSaved
from distdiag.model_view import ScalingView
from distdiag.ranks import RankSet

ModelEvent = ModelPlan | ModelState | OptimizerState | SliceSaved | LossWeights
KINDS = (ModelPlan, ModelState, OptimizerState, SliceSaved)

_MORE = 1.01
"""Gradients that were multiplied by more were not merely clipped."""


class ModelWatch:
    """Feed events as they come; what is complete is judged at once, the rest at the end."""

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Watch the models of these ranks."""
        self._judges = judges
        self._models = Models()
        self._optimizers = OptimizerSteps(world)
        self._saves = SliceSaves()
        self._losses = LossWindows(world)
        self._blind: set[int] = set()

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
                    if isinstance(view, ScalingView) and max(view.by_rank.values()) > _MORE:
                        self._losses.is_multiplied = True
            case LossWeights():
                losses = self._losses.add(event)
                if losses is not None:
                    self._judges.judge_losses(losses)
            case OptimizerState():
                alignment = self._optimizers.add(event)
                if alignment is not None:
                    self._judges.judge(alignment)
            case ProbeDisabled(probe="models"):
                self._blind.add(event.rank)
            case SliceSaved():
                self._saves.add(event)

    def finish(self) -> None:
        """Judge what not all ranks have reached."""
        for alignment in self._optimizers.rest():
            self._judges.judge(alignment)
        for save in self._saves.incomplete():
            self._judges.judge_missing(save)
