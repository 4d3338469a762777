"""Finds gradients that ranks apply as they are while they sum those of other parameters by hand."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.collectives.traffic import Surplus, element_bytes
from distdiag.engine.models.models import RankModels
from distdiag.engine.models.replicas import (
    Copies,
    are_all_different,
    are_equal,
    has_one_owner,
    is_zero,
    sum_of,
)
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective
from distdiag.events.lifecycle import ProbeDisabled, StepEnd
from distdiag.events.models import (
    Content,
    ModelPlan,
    ModelState,
    Moment,
    ReplicaEvidence,
    TensorPlan,
)
from distdiag.views.base import View
from distdiag.views.experts import is_of_expert
from distdiag.views.gradients import Ranks, Sum, SumsView

_BLIND: Final = NotObserved("models, or what is sent between ranks, are not observed wholly")
_NO_SUMS: Final = NothingThere(
    "gradients reduced by hand", "no gradients were compared but what wrappers combine"
)
FIRST_STEPS: Final = 3
FEWEST_STEPS: Final = 4
"""In a run that is over after fewer steps nothing can be known to be never summed."""

_REDUCING: Final = ("all_reduce", "reduce_scatter")
_WITHOUT_GROUP: Final = (ReplicaEvidence.WORLD, ReplicaEvidence.REDUCED)

Held = Mapping[str, tuple[TensorPlan, Content]]
_Sample = tuple[Moment, int]


class SumsAligner(Aligner):
    """Which gradients ranks sum by hand; shown after a hundred steps and at the end."""

    needs = (ModelPlan, ModelState, Collective, StepEnd, ProbeDisabled)

    builds = (SumsView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._models = {rank: RankModels() for rank in job.world}
        self._samples: dict[str, dict[_Sample, dict[int, Held]]] = {}
        self._sites: dict[tuple[str, int], CallSite] = {}
        self._groups: set[Ranks] = set()
        self._surplus = Surplus(FIRST_STEPS)
        self._num_steps = 0
        self._is_blind = False
        self._has_looked = False

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether no gradients of several ranks were seen side by side."""
        if self.job.only_start:
            return {SumsView: LIGHT}
        if self._is_blind:
            return {SumsView: _BLIND}
        return {} if self._has_looked else {SumsView: _NO_SUMS}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case ModelPlan():
                self._models[event.rank].add_plan(event)
            case ModelState():
                yield from self._note(event)
            case Collective():
                self._surplus.add(event)
                if event.signature.op.startswith(_REDUCING) and len(event.group.ranks) > 1:
                    self._groups.add(tuple(sorted(event.group.ranks)))
            case StepEnd():
                self._num_steps = max(self._num_steps, event.step + 1)
            case ProbeDisabled(probe="models" | "collectives" | "collective-wrappers"):
                self._is_blind = True

    def end(self) -> Iterator[View]:
        """Show all models once more: more is known of what was sent."""
        for model in self._samples:
            yield from self._views(model)

    def _note(self, event: ModelState) -> Iterator[View]:
        models = self._models[event.rank]
        complete = models.add_state(event)
        if complete is None:
            return
        (model, moment, step, _), contents = complete
        held = {
            plan.name: (plan, content)
            for plan, content in zip(models.plans[model], contents, strict=True)
            if content is not None and plan.requires_grad and not plan.tied_to
            if plan.evidence in _WITHOUT_GROUP
        }
        samples = self._samples.setdefault(model, {})
        samples.setdefault((moment, step), {})[event.rank] = held
        if moment is Moment.GRADIENT:
            self._sites.setdefault((model, event.rank), event.site)
        for late in [sample for sample in samples if FIRST_STEPS <= sample[1] < step]:
            del samples[late]  # of the later ones the last is kept
        is_late = moment is Moment.STEP and step >= FIRST_STEPS
        if is_late and samples[moment, step].keys() >= self._models.keys():
            yield from self._views(model)

    def _views(self, model: str) -> Iterator[View]:
        if self._is_blind or self._num_steps < FEWEST_STEPS:
            return
        summing: list[set[int]] = []
        for group in sorted(self._groups, key=lambda ranks: (-len(ranks), ranks)):
            if any(set(group) < larger for larger in summing):
                continue  # it tells what is not summed here, either
            view = self._view(model, group)
            if view is not None:
                yield view
                if any(Sum.SUMMED in found for found in view.sums.values()):
                    summing.append(set(group))

    def _view(self, model: str, group: Ranks) -> SumsView | None:
        samples = {
            sample: _side_by_side([by_rank[rank] for rank in group], group)
            for sample, by_rank in self._samples[model].items()
            if by_rank.keys() >= set(group)
        }
        steps = sorted(step for moment, step in samples if moment is Moment.GRADIENT)
        start = samples.get((Moment.START, 0), {})
        if not steps or not start:
            return None
        self._has_looked = True
        first = samples[Moment.GRADIENT, steps[0]]
        names = [n for n in start if are_equal(start[n]) and n in first and has_one_owner(first[n])]
        later = [
            found for (moment, step), found in samples.items() if moment is Moment.STEP and step
        ]
        drifted = [
            n for n in names if later and all(n in f and are_all_different(f[n]) for f in later)
        ]
        return SumsView(
            model,
            group,
            {name: first[name][group[0]][0] for name in names},
            {name: tuple(_sums(samples, steps, name)) for name in names},
            frozenset(drifted),
            steps[0],
            self._sites[model, group[0]],
            any(
                not are_equal(each) and not is_of_expert(each[group[0]][0])
                for each in start.values()
            ),
            self._is_more_sent(group, [start[name][group[0]] for name in drifted]),
        )

    def _is_more_sent(self, group: Ranks, tensors: Sequence[tuple[TensorPlan, Content]]) -> bool:
        size = sum(c.num_elements * element_bytes(plan.dtype) for plan, c in tensors)
        return 2 * self._surplus.between(frozenset(group)) >= size


def _side_by_side(held: Sequence[Held], group: Ranks) -> dict[str, Copies]:
    """Return the contents by rank of what all of them hold."""
    names = set.intersection(*(set(each) for each in held))
    return {
        name: {rank: each[name] for rank, each in zip(group, held, strict=True)}
        for name in sorted(names)
    }


def _sums(
    samples: Mapping[_Sample, Mapping[str, Copies]], steps: Sequence[int], name: str
) -> Iterator[Sum]:
    """Yield what is done with a gradient, for each sample that has one on all ranks."""
    for step in steps:
        copies = samples[Moment.GRADIENT, step].get(name)
        before = samples.get((Moment.BACKWARD, step), {}).get(name)
        if copies is None:
            yield Sum.OTHER
        elif not is_zero(copies):
            yield sum_of(copies, before)
