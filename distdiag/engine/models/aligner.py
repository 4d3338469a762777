"""What the engine knows of models, their optimizers and what is saved of them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import MOST_FOLLOWED, SinceFirst
from distdiag.engine.losses.losses import LossAligner
from distdiag.engine.models.models import Models
from distdiag.engine.models.optimizers import Untrained
from distdiag.engine.models.plans import UserPlans
from distdiag.engine.models.replicas import UnsyncedReplicas
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import Event
from distdiag.events.checkpoints import WeightsSaved
from distdiag.events.collectives import Collective
from distdiag.events.lifecycle import ProbeDisabled, RankStarted
from distdiag.events.losses import LossWeights
from distdiag.events.models import (
    Content,
    ModelPlan,
    ModelState,
    Moment,
    OptimizerState,
    PartialRead,
    PlanPatterns,
    ReplicaEvidence,
    SliceSaved,
    TensorPlan,
)
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment, OptimizerView, RandomView, SliceSaveView
from distdiag.views.base import View
from distdiag.views.experts import is_of_expert
from distdiag.views.models import (
    ContentView,
    EvaluationReplicas,
    ExpertContents,
    GradientReplicas,
    LaterContents,
    ModelView,
    ProgramPlanView,
    ReplicaView,
    RouterBiasReplicas,
    RuleView,
    ScalingView,
    StartReplicas,
    StepReplicas,
    UntrainedView,
)

# Saves of parts of sharded parameters, of all ranks that hold parts.

SaveAlignment = Alignment[SliceSaved]


class SliceSaves:
    """Collect who saved its parts; that some did not is only certain at the end."""

    def __init__(self) -> None:
        self._saves: dict[int, SliceSaved] = {}
        self._own: dict[int, SliceSaved] = {}
        self._apart: set[str] = set()
        self._shared: set[int] = set()

    def add(self, event: SliceSaved) -> None:
        """Take in one event."""
        (self._own if event.are_own else self._saves).setdefault(event.rank, event)

    def share(self, rank: int) -> None:
        """Take note of a rank that gives its weights to a distributed checkpoint."""
        self._shared.add(rank)

    def look(self, view: ContentView) -> None:
        """Take note of what each rank has for itself: as it was told, and as the values show."""
        seen: dict[str, set[str]] = {}
        for held in view.by_rank.values():
            for plan, content in held:
                if plan.is_ignored or plan.evidence is ReplicaEvidence.OWN:
                    seen.setdefault(plan.name, set()).add(content.digest)
        of_one = {
            name for name in seen if sum(_has(held, name) for held in view.by_rank.values()) == 1
        }
        self._apart |= of_one | {name for name, digests in seen.items() if len(digests) > 1}

    def incomplete(self) -> Iterator[SaveAlignment]:
        """Yield a save, if of no set of ranks that make up the whole all have saved."""
        own = {rank: e for rank, e in self._own.items() if not self._apart.isdisjoint(e.names)}
        for saves, elsewhere in ((self._saves, set()), (own, self._shared)):
            done = saves.keys() | elsewhere
            if saves and not any(done >= set(event.members) for event in saves.values()):
                first = saves[min(saves)]
                yield Alignment("save", first.names, saves, RankSet(first.members))


def _has(held: Iterable[tuple[TensorPlan, Content]], name: str) -> bool:
    return any(plan.name == name for plan, _ in held)


# Puts the states of random number generators side by side where they should be equal.

MOST_OPEN: Final = 256

_Event = RandomDraw | RandomState


class RandomStreams:
    """Collect events until all ranks that should agree have reported theirs."""

    def __init__(self) -> None:
        self._open: dict[tuple[str | int, ...], dict[int, _Event]] = {}
        self._counts: dict[tuple[str | int, ...], tuple[int, int]] = {}

    def add(self, event: _Event) -> Iterator[Alignment[_Event]]:
        """Take in one event; yield the alignment that it completes."""
        if len(event.members) < 2:
            return
        key = self._key(event)
        reported = self._open.setdefault(key, {})
        reported[event.rank] = event
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        if reported.keys() >= set(event.members):
            self._open.pop(key, None)
            by_rank = {rank: reported[rank] for rank in sorted(event.members)}
            yield Alignment("random", key, by_rank, RankSet(by_rank))

    def _key(self, event: _Event) -> tuple[str | int, ...]:
        if isinstance(event, RandomDraw):
            return "draw", event.number, *event.members
        place: tuple[str | int, ...] = (event.rank, event.moment, *event.members)
        step, count = self._counts.get(place, (event.step, -1))
        count = count + 1 if step == event.step else 0
        self._counts[place] = event.step, count
        return "state", count, event.moment, event.step, *event.members


# The aligner, and what it says of views that it never built.

_NO_MODEL: Final = NothingThere("models", "no model was seen")
_NO_STEP: Final = NothingThere("training steps", "no step of a model was compared")
_NO_COPIES: Final = NothingThere("replicas", "no two ranks hold a tensor that should be the same")
_NO_PLAN: Final = NothingThere(
    "sharding plans", "no sharding plan was given, by a table or by the program"
)
_NEVER: Final[Mapping[type[View | Event], NothingThere]] = {
    ModelView: NothingThere("models", "nothing tells which ranks keep a model together"),
    ContentView: NothingThere("models", "not all ranks reported what their models hold at first"),
    ExpertContents: NothingThere("experts", "no parameter was recognised as one of an expert"),
    ScalingView: NothingThere(
        "gradient scaling", "by what a model's gradients were scaled was not seen"
    ),
    StartReplicas: _NO_COPIES,
    GradientReplicas: _NO_STEP,
    StepReplicas: _NO_STEP,
    EvaluationReplicas: NothingThere(
        "evaluations", "no wrapped model that keeps statistics of its samples was evaluated"
    ),
    RouterBiasReplicas: NothingThere("experts", "no bias was seen by which experts are chosen"),
    OptimizerView: _NO_STEP,
    UntrainedView: _NO_STEP,
    RandomView: NothingThere(
        "shared random draws", "no two ranks draw where they should draw the same"
    ),
    RuleView: _NO_PLAN,
    ProgramPlanView: _NO_PLAN,
    PartialRead: _NO_MODEL,
    SliceSaveView: _NO_MODEL,
}
"""What is said of views of which there was none."""
_OF_STEPS: Final = (
    GradientReplicas,
    StepReplicas,
    EvaluationReplicas,
    OptimizerView,
    UntrainedView,
    ScalingView,
)
_REPLICAS: Final[Mapping[Moment, type[ReplicaView]]] = {
    Moment.START: StartReplicas,
    Moment.GRADIENT: GradientReplicas,
    Moment.STEP: StepReplicas,
    Moment.EVALUATION: EvaluationReplicas,
}
_OF_MODELS: Final = (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    PlanPatterns,
    RandomState,
    SliceSaved,
)


class ModelAligner(Aligner):
    """Models, their optimizers and losses, and what is saved of them.

    What is complete is shown at once, the rest at the end.
    """

    needs = (
        *_OF_MODELS,
        WeightsSaved,
        LossWeights,
        RandomDraw,
        RankStarted,
        *UnsyncedReplicas.needs,
    )
    builds = (*_NEVER, *LossAligner.builds)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._unsynced = UnsyncedReplicas()
        self._models = Models(
            self._unsynced.parallel, num_ranks=len(job.world), forgotten=job.forgotten
        )
        self._optimizers = SideBySide(job.world)
        self._last_steps: SinceFirst[str, dict[int, tuple[int, int]]]
        self._last_steps = SinceFirst(4 * MOST_FOLLOWED, forgotten=job.forgotten)
        self._untrained = Untrained(job.forgotten)
        self._saves = SliceSaves()
        self._plans = UserPlans(job.world, job.rules)
        self._random = RandomStreams()
        self._losses = LossAligner(job)
        self._blind: set[int] = set()
        self._sees_all = True
        self._seen: set[object] = set()
        """Types of events, views that were complete, and moments of contents."""

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say of what there was nothing to compare."""
        losses = self._losses.gaps()
        if self._blind:
            why = f"the models of {RankSet(self._blind).phrase()} are not observed wholly"
            return losses | dict.fromkeys(_NEVER, NotObserved(why))
        gaps: dict[type[View | Event], Gap] = {
            view: gap for view, gap in _NEVER.items() if view not in self._seen
        }
        if not any(kind in self._seen for kind in _OF_MODELS):
            # Random numbers are drawn without a model, too.
            without = gaps.keys() - ({RandomView} if RandomDraw in self._seen else set())
            return losses | gaps | dict.fromkeys(without, _NO_MODEL)
        for moment, view in _REPLICAS.items():
            if view in gaps and moment in self._seen:
                gaps[view] = _NO_COPIES
        if self.job.only_start:
            gaps |= {view: LIGHT for view in _OF_STEPS if view in gaps}
        if ModelPlan in self._seen:  # it would have been heard of
            gaps.pop(PartialRead, None)
            gaps.pop(SliceSaveView, None)
        return losses | gaps

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        self._seen.add(type(event))
        if isinstance(event, UnsyncedReplicas.needs):
            yield from self._of_replicas(self._unsynced.feed(event))
        match event:
            case LossWeights() | Collective():
                yield from self._losses.feed(event)
            case ProbeDisabled():
                yield from self._losses.feed(event)
                if event.probe == "models":
                    self._blind.add(event.rank)
            case RandomState() | RandomDraw():
                for alignment in self._random.add(event):
                    yield self._seen_now(alignment.show_as(RandomView, {}))
            case RankStarted():
                self._sees_all &= event.world_size <= len(self.job.world)
            case _:
                yield from self._feed_of_models(event)

    def _feed_of_models(self, event: Event) -> Iterator[View]:
        match event:
            case WeightsSaved():
                self._saves.share(event.rank)
            case ModelPlan() | ModelState():
                yield from self._feed_model(event)
            case OptimizerState():
                yield from self._feed_step(event)
            case PlanPatterns():
                self._plans.add(event)
            case SliceSaved():
                self._saves.add(event)

    def _feed_step(self, event: OptimizerState) -> Iterator[View]:
        self._untrained.add(event)
        self._seen.add(UntrainedView)
        last_steps = self._last_steps.find(event.optimizer, dict)
        if last_steps is not None:
            last, generation = last_steps.get(event.rank, (-1, 0))
            generation += event.step <= last  # another one of the same name has taken its place
            last_steps[event.rank] = event.step, generation
            alignment = self._optimizers.add(event, generation)
            if alignment is not None:
                yield self._seen_now(alignment.show_as(OptimizerView, {}))
        if self._plans.has_stepped(event.rank):
            yield from self._plan_views()

    def _feed_model(self, event: ModelPlan | ModelState) -> Iterator[View]:
        if isinstance(event, ModelState):
            self._seen.add(event.moment)
        elif any(tensor.is_routing_bias for tensor in event.tensors):
            self._seen.add(RouterBiasReplicas)
        if isinstance(event, ModelPlan) and any(map(is_of_expert, event.tensors)):
            self._seen.add(ExpertContents)
        for view in self._models.feed(event):
            self._losses.note(view)
            if isinstance(view, ContentView):
                self._saves.look(view)
            if isinstance(view, LaterContents):
                continue  # it is nothing for checks
            if isinstance(view, ReplicaView):
                yield from self._of_replicas((view,))
                self._unsynced.note(view)
                continue
            yield self._seen_now(view)
            if isinstance(view, ContentView) and ExpertContents in self._seen:
                yield view.narrowed(ExpertContents)
        self._seen.update(_REPLICAS[m] for m in self._models.compared if m in _REPLICAS)

    def _of_replicas(self, views: Iterable[ReplicaView]) -> Iterator[View]:
        """Yield views of replicas as those of their moment."""
        for view in views:
            if view.moment in _REPLICAS:
                yield view.narrowed(_REPLICAS[view.moment])
            if view.moment is Moment.STEP and RouterBiasReplicas in self._seen:
                yield view.narrowed(RouterBiasReplicas)

    def end(self) -> Iterator[View]:
        """Show what not all ranks have reached."""
        for alignment in self._optimizers.rest():
            yield self._seen_now(alignment.show_as(OptimizerView, {}))
        yield from self._untrained.views(self._models.plans_of)
        for save in self._saves.incomplete():
            yield save.show_as(SliceSaveView, {})
        yield from self._plan_views()
        yield from self._of_replicas(self._unsynced.end())

    def _plan_views(self) -> Iterator[View]:
        # Of ranks that nobody sees it is not known what a pattern matches there.
        if self._sees_all and not self._blind:
            for view in self._plans.views(self._models.plans()):
                yield self._seen_now(view)

    def _seen_now(self, view: View) -> View:
        self._seen.add(type(view))
        return view
