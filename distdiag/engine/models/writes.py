"""What becomes of parameters and buffers over steps, compared over ranks and over like modules."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from distdiag.checks.shd.neglected_buffer import Neglect, NeglectedBuffers
from distdiag.checks.shd.unheld_parameter import Holding, UnheldView
from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.engine.models.models import RankModels
from distdiag.events.base import CallSite, Event
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import (
    Content,
    ModelPlan,
    ModelState,
    Moment,
    OptimizerState,
    ReplicaEvidence,
    TensorPlan,
    kept_ranks,
)
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

FEWEST: Final = 3
"""So many samples make two intervals: what changed in one alone may have been set up late."""
_MOST: Final = 8
"""Of so many samples the contents of buffers are kept: the first ones and some hundredth steps."""
_NO_STEP: Final = NothingThere("training steps", "no model took three steps that were looked at")

_UNSHARED: Final = (
    ReplicaEvidence.WORLD,
    ReplicaEvidence.OWN,
    ReplicaEvidence.FROZEN,
    ReplicaEvidence.LONE,
    ReplicaEvidence.OTHER_GROUPS,
)
"""Evidence that does not say that ranks train one parameter together."""

_Entries = Mapping[str, Mapping[int, int]]
"""How many parameters of models optimizers hold, by their names and by rank."""

Lives = Mapping[str, Sequence[Content]]
"""What buffers of one rank held at the same steps."""


@dataclass(slots=True)
class _Trained:
    digest: str = ""
    num_changes: int = 0
    num_gradients: int = 0

    def add(self, digest: str) -> None:
        self.num_changes += bool(self.digest) and digest != self.digest
        self.digest = digest


@dataclass(slots=True)
class _Kept:
    """One model of one rank."""

    plans: tuple[TensorPlan, ...]
    trained: dict[str, _Trained] = field(default_factory=dict)
    buffers: dict[str, deque[tuple[int, Content]]] = field(default_factory=dict)
    num_samples: int = 0
    site: CallSite = field(default_factory=lambda: CallSite(()))

    def add(self, event: ModelState, contents: Sequence[Content | None]) -> None:
        self.site = event.site
        self.num_samples += event.moment is Moment.STEP
        for plan, content in zip(self.plans, contents, strict=True):
            if content is None or content.num_elements == 0:
                continue
            if plan.requires_grad:
                trained = self.trained.setdefault(plan.name, _Trained())
                if event.moment is Moment.STEP:
                    trained.add(content.digest)
                else:
                    trained.num_gradients += content.zero_share < 1
            elif event.moment is Moment.STEP and not plan.is_parameter:
                known = self.buffers.setdefault(plan.name, deque(maxlen=_MOST))
                known.append((event.step, content))

    def members(self, world: Iterable[int]) -> frozenset[int]:
        return frozenset(kept_ranks(self.plans) or world)


class WriteAligner(Aligner):
    """Follows what models hold from one sampled step to the next."""

    needs = (ModelPlan, ModelState, OptimizerState, ProbeDisabled)
    builds = (UnheldView, NeglectedBuffers)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._parts: dict[int, RankModels] = {}
        self._kept: Recent[str, dict[int, _Kept]] = Recent(MOST_FOLLOWED)
        self._entries: Recent[str, dict[int, int]] = Recent(4 * MOST_FOLLOWED)
        self._shown: set[object] = set()
        self._is_judged = False
        self._blind: set[int] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there were too few steps, or not all were seen."""
        if self._blind:
            why = f"the models of {RankSet(self._blind).phrase()} are not observed wholly"
            return dict.fromkeys(self.builds, NotObserved(why))
        if self._is_judged:
            return {}
        return dict.fromkeys(self.builds, LIGHT if self.job.only_start else _NO_STEP)

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case ProbeDisabled(probe="models"):
                self._blind.add(event.rank)
            case OptimizerState():
                num_known = event.num_parameters - event.num_foreign
                self._entries.of(event.optimizer, dict)[event.rank] = num_known
            case ModelPlan():
                self._feed_plan(event)
            case ModelState(moment=Moment.STEP | Moment.GRADIENT):
                yield from self._feed_state(event)

    def _feed_plan(self, event: ModelPlan) -> None:
        parts = self._parts.setdefault(event.rank, RankModels())
        if not parts.add_plan(event):
            return
        ranks, plans = self._kept.of(event.model, dict), parts.plan_of(event.model)
        if event.moment is Moment.START or event.rank not in ranks:
            ranks[event.rank] = _Kept(plans)
        else:
            ranks[event.rank].plans = plans

    def _feed_state(self, event: ModelState) -> Iterator[View]:
        complete = self._parts.setdefault(event.rank, RankModels()).add_state(event)
        if complete is None:
            return
        ranks = self._kept.of(event.model, dict)
        kept = ranks.get(event.rank)
        if kept is None or len(kept.plans) != event.total:
            return
        kept.add(event, complete[1])
        members = kept.members(self.job.world)
        if event.moment is Moment.STEP and members <= ranks.keys():
            group = {rank: ranks[rank] for rank in sorted(members)}
            if FEWEST <= kept.num_samples == min(each.num_samples for each in group.values()):
                self._is_judged = True
                yield from self._new(_unheld(event.model, group, self._entries))
                yield from self._new(_neglected(event.model, group))

    def _new(self, view: UnheldView | NeglectedBuffers) -> Iterator[View]:
        """Yield a view if it holds something, or did."""
        holds = view.unheld if isinstance(view, UnheldView) else view.buffers
        if holds or view.supersedes in self._shown:
            self._shown.add(view.supersedes)
            yield view


# Parameters that are in no optimizer of some ranks.


def _unheld(model: str, group: Mapping[int, _Kept], entries: _Entries) -> UnheldView:
    by_name: dict[str, dict[int, TensorPlan]] = {}
    for rank, kept in group.items():
        for plan in kept.plans:
            if plan.requires_grad and not plan.is_ignored:
                by_name.setdefault(plan.name, {})[rank] = plan
    unheld: dict[int, list[str]] = {}
    holders: set[int] = set()
    for name, plans in by_name.items():
        lives = {r: group[r].trained[name] for r in plans if name in group[r].trained}
        # A piece of no elements cannot change, but whoever holds it means all of them to train.
        holding = {
            rank
            for rank, plan in plans.items()
            if plan.owners and (lives[rank].num_changes if rank in lives else plan.split_over)
        }
        for rank, life in lives.items():
            sharing = holding & _sharing(plans[rank])
            if sharing and not plans[rank].owners and _is_idle(life):
                unheld.setdefault(rank, []).append(name)
                holders |= sharing
    return UnheldView(
        model,
        {rank: tuple(names) for rank, names in unheld.items()},
        RankSet(holders),
        {rank: tuple(_holdings(rank, kept, entries)) for rank, kept in group.items()},
        min(kept.num_samples for kept in group.values()),
        {rank: kept.site for rank, kept in group.items()},
    )


def _is_idle(life: _Trained) -> bool:
    # With a gradient, and without a change by hand or by a broadcast of whoever holds it.
    return life.num_gradients > 0 and life.num_changes == 0


def _sharing(plan: TensorPlan) -> set[int]:
    known = set(plan.split_over) if plan.mesh is None else set(plan.mesh.ranks)
    return known if plan.evidence in _UNSHARED else known.union(plan.replicas)


def _holdings(rank: int, kept: _Kept, entries: _Entries) -> Iterator[Holding]:
    names: dict[str, list[str]] = {}
    for plan in kept.plans:
        for owner in plan.owners if not plan.tied_to else ():
            names.setdefault(owner, []).append(plan.name)
    for owner, held in names.items():
        yield Holding(owner, entries.get(owner, {}).get(rank, len(held)), tuple(held))


# Buffers that live otherwise than those of like modules.


def _neglected(model: str, group: Mapping[int, _Kept]) -> NeglectedBuffers:
    steps = _common_steps(group.values())
    lives = {
        rank: {
            name: [content for step, content in seen if step in steps]
            for name, seen in kept.buffers.items()
        }
        for rank, kept in group.items()
    }
    found: dict[str, Neglect] = {}
    siblings: dict[str, None] = {}
    is_enough = len(steps) >= FEWEST
    for names in _like_buffers(group) if is_enough else ():
        for neglect, judge in _JUDGES.items():
            verdicts = {name: judge(name, lives) for name in names}
            odd = [name for name, is_regular in verdicts.items() if is_regular is False]
            regular = [name for name, is_regular in verdicts.items() if is_regular is True]
            # One alone may be intended to be without, or the others to be with; so may a half.
            if odd and len(regular) >= 2 and len(odd) < len(regular):
                found |= {name: neglect for name in odd if name not in found}
                siblings |= dict.fromkeys(regular)
    return NeglectedBuffers(model, RankSet(group), found, tuple(siblings), tuple(sorted(steps)))


def _common_steps(group: Iterable[_Kept]) -> set[int]:
    steps = [{step for step, _ in seen} for kept in group for seen in kept.buffers.values()]
    return set.intersection(*steps) if steps else set()


def _like_buffers(group: Mapping[int, _Kept]) -> Iterator[tuple[str, ...]]:
    """Yield, for each attribute of modules that are alike, the buffers of all of them."""
    found: dict[tuple[object, ...], list[str]] = {}
    first = next(iter(group.values()))
    inside: dict[str, list[tuple[object, ...]]] = {}
    paths = {name.rpartition(".")[0] for name in first.buffers} - {""}
    for plan in first.plans:
        for path in _paths_above(plan.name):
            if path in paths:
                own = plan.name.removeprefix(path), plan.shape, plan.dtype, plan.requires_grad
                inside.setdefault(path, []).append(own)
    for name in first.buffers:
        path, _, attribute = name.rpartition(".")
        if path and all(name in kept.buffers for kept in group.values()):
            found.setdefault((attribute, *sorted(inside[path], key=str)), []).append(name)
    yield from (tuple(names) for names in found.values() if len(names) > 2)


def _paths_above(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _is_updated(name: str, lives: Mapping[int, Lives]) -> bool | None:
    if all(_changes_mostly(each[name]) for each in lives.values()):
        return True
    is_still = all(_num_changes(each[name]) == 0 for each in lives.values())
    return False if is_still and _is_used(name, lives) else None


def _is_reset(name: str, lives: Mapping[int, Lives]) -> bool | None:
    if all(_begins_anew(each[name]) for each in lives.values()) and _is_used(name, lives):
        return True
    return False if all(_grows(each[name]) for each in lives.values()) else None


def _is_reduced(name: str, lives: Mapping[int, Lives]) -> bool | None:
    if len(lives) < 2 or not all(_num_changes(each[name]) for each in lives.values()):
        return None
    samples = zip(*(each[name] for each in lives.values()), strict=True)
    differing = [len({content.digest for content in each}) > 1 for each in samples]
    if not any(differing):
        return True
    return False if all(differing[1:]) else None  # the first sample may be from before the first


_JUDGES: Final[Mapping[Neglect, Callable[[str, Mapping[int, Lives]], bool | None]]] = {
    Neglect.UPDATED: _is_updated,
    Neglect.RESET: _is_reset,
    Neglect.REDUCED: _is_reduced,
}


def _num_changes(seen: Sequence[Content]) -> int:
    pairs = pairwise(seen)
    return sum(one.digest != other.digest for one, other in pairs)


def _changes_mostly(seen: Sequence[Content]) -> bool:
    """Say whether a buffer is updated all the time.

    One that goes up and down by equal amounts may be back at the same numbers several steps later.
    """
    return 2 * _num_changes(seen) > len(seen) - 1


def _is_used(name: str, lives: Mapping[int, Lives]) -> bool:
    """Say whether another buffer of the module is updated all the time: the module is at work."""
    path = name.rpartition(".")[0]
    return any(
        other != name
        and other.rpartition(".")[0] == path
        and all(_changes_mostly(each[other]) for each in lives.values())
        for other in next(iter(lives.values()))
        if all(other in each for each in lives.values())
    )


def _begins_anew(seen: Sequence[Content]) -> bool:
    """Say whether a buffer is always zero when it is looked at, or other numbers of one sum."""
    if all(content.zero_share == 1 for content in seen):
        return True
    is_changing = _num_changes(seen) == len(seen) - 1
    return is_changing and len({content.mean for content in seen}) == 1


def _grows(seen: Sequence[Content]) -> bool:
    pairs = list(pairwise(seen))
    never_falls = all(a.least <= b.least and a.greatest <= b.greatest for a, b in pairs)
    return never_falls and all(a.mean < b.mean for a, b in pairs)
