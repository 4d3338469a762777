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
from distdiag.ranks import RankSet

ModelEvent = ModelPlan | ModelState | OptimizerState | SliceSaved | LossWeights
KINDS = (ModelPlan, ModelState, OptimizerState, SliceSaved)


class ModelWatch:
    """Feed events as they come; what is complete is judged at once, the rest at the end."""

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Watch the models of these ranks."""
        self._judges = judges
        self._models = Models()
        self._optimizers = OptimizerSteps(world)
        self._saves = SliceSaves()
        self._losses = LossWindows(world)
        self._is_read: bool | None = None
        self._blind: set[int] = set()
        self._lost: set[int] = set()

    @property
    def problems(self) -> dict[type[Event], str]:
        """Why not all models or losses were compared, by the events that are missing."""
        found: dict[type[Event], str] = {}
        if self._blind:
            why = f"the models of {RankSet(self._blind).phrase()} are not observed wholly"
            found = dict.fromkeys(KINDS, why)
        if self._lost:
            why = f"the losses of {RankSet(self._lost).phrase()} are not observed wholly"
            found[LossWeights] = why
        elif self._is_read is False:
            found[LossWeights] = "no loss was seen of a kind that can be weighed"
        return found

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case ModelPlan() | ModelState():
                for view in self._models.feed(event):
                    self._judges.judge_model(view)
                    self._losses.note(view)
            case LossWeights():
                self._feed_losses(event)
            case OptimizerState():
                alignment = self._optimizers.add(event)
                if alignment is not None:
                    self._judges.judge(alignment)
            case ProbeDisabled(probe="models"):
                self._blind.add(event.rank)
            case ProbeDisabled(probe="losses"):
                self._lost.add(event.rank)
            case SliceSaved():
                self._saves.add(event)

    def _feed_losses(self, event: LossWeights) -> None:
        self._is_read = bool(self._is_read) or any(event.passes)
        view = self._losses.add(event)
        if view is not None:
            self._judges.judge_losses(view)

    def finish(self) -> None:
        """Judge what not all ranks have reached."""
        for alignment in self._optimizers.rest():
            self._judges.judge(alignment)
        for save in self._saves.incomplete():
            self._judges.judge_missing(save)
