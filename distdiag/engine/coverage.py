"""What a run has none of, and what its profile leaves out: checks of it have looked at nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from distdiag.checks.base import Check
from distdiag.engine.aligner import Watch
from distdiag.engine.runner import Judges
from distdiag.events.base import Event
from distdiag.events.collectives import GroupCreated
from distdiag.events.data import ModelFed, ScheduleState
from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import ProcessesSpawned, Unobserved
from distdiag.events.losses import LossWeights
from distdiag.events.models import (
    ModelPlan,
    ModelState,
    Moment,
    OptimizerState,
    PartialRead,
    PlanPatterns,
    SliceSaved,
)
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.events.routing import AuxLoss, CounterWritten, Routing
from distdiag.events.sequences import SequenceUse
from distdiag.views.models import ContentView, ModelView, ScalingView

# What of models was compared, and so which checks of models have looked at all.

KINDS: Final = (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    PlanPatterns,
    RandomState,
    SliceSaved,
)

_TO_BE_COMPARED: Final = ModelState | OptimizerState | PlanPatterns | RandomDraw | RandomState
_LATE: Final = frozenset(Moment) - {Moment.START}
_NO_MODEL: Final = "no model was seen"
_NO_STEP: Final = "no step of a model was compared"
_NO_SCALING: Final = "by what a model's gradients were scaled was not seen"
_STEPS: Final = (_NO_STEP, _NO_SCALING)
_NO_COPIES: Final = "no two ranks hold a tensor that should be the same"
LIGHT: Final = "the light profile leaves the steps out"


class ModelCoverage:
    """Knows which kinds of comparison took place at least once."""

    def __init__(self, *, only_start: bool) -> None:
        """Nothing was compared yet; `only_start`: ranks leave the steps out."""
        self._only_start = only_start
        self._seen: set[type[Event]] = set()
        self._compared: set[object] = set()
        self._moments: set[object] = set()

    def saw(self, event: Event) -> None:
        """Take note that a rank told something of a model."""
        self._seen.add(type(event))
        if isinstance(event, ModelState):
            self._moments.add(event.moment)
        if not isinstance(event, _TO_BE_COMPARED):
            self._compared.add(type(event))  # these speak for themselves

    def compared(self, what: object) -> None:
        """Take note of a comparison: the type of a view or event, or the moment of contents."""
        self._compared.add(what)

    def gap(self, check: type[Check]) -> str:
        """Say why a check has compared nothing, or return an empty string."""
        ways = list(_ways(check))
        if not ways or any(what in self._compared for what, _ in ways):
            return ""
        if not self._seen:
            return _NO_MODEL
        if self._only_start and all(reason in _STEPS for _, reason in ways):
            return LIGHT
        what, reason = ways[0]
        return _NO_COPIES if what in self._moments else reason


def _ways(check: type[Check]) -> Iterator[tuple[object, str]]:
    """Yield what a check compares, one of which will do, with what is said if it never came."""
    if OptimizerState in check.needs:
        yield OptimizerState, _NO_STEP
    for kind in (PartialRead, SliceSaved):
        if kind in check.needs:
            yield kind, _NO_MODEL
            yield ModelPlan, _NO_MODEL  # it would have been heard of
    if RandomState in check.needs:
        yield RandomState, "no two ranks draw where they should draw the same"
    if PlanPatterns in check.needs:
        yield PlanPatterns, "no sharding plan was given, by a table or by the program"
    if ModelPlan in check.needs:
        yield ModelView, "nothing tells which ranks keep a model together"
    if ModelState in check.needs:
        yield from _ways_of_states(check)


def _ways_of_states(check: type[Check]) -> Iterator[tuple[object, str]]:
    if check.check_contents is not Check.check_contents:
        yield ContentView, "not all ranks told what their models hold at first"
    if check.check_scaling is not Check.check_scaling:
        yield ScalingView, _NO_SCALING
    if check.check_replicas is not Check.check_replicas:
        for moment in check.moments or Moment:
            yield moment, _NO_STEP if moment in _LATE else _NO_COPIES


# What nobody observes: ranks of a run that write nothing, and what the probes of others lack.


class UnobservedRanks:
    """Feed it all events; `ranks` are those beyond the world that the monitors read.

    A script may start ranks by itself: Lightning runs it again for each further rank, and
    ``torch.multiprocessing.spawn`` leaves no rank to the process that was started through distdiag.
    """

    def __init__(self, world: RankSet) -> None:
        """Expect nobody beside these ranks."""
        self.ranks = RankSet()
        self._world = world
        self._is_member = False

    def feed(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case GroupCreated() if event.has_processes:
                before = self.ranks if self._is_member else RankSet()
                self._is_member = True
                # Smaller groups are parts of the one whose scope is the whole job.
                scope = event.scope if len(event.scope) > len(self._world) else ()
                self.ranks = RankSet({*before, *scope} - set(self._world))
            case ProcessesSpawned() if len(self._world) == 1 and not self._is_member:
                self.ranks = RankSet(range(max(event.number, len(self.ranks))))

    @property
    def reason(self) -> str:
        """Why the ranks that were observed were compared with nobody; empty if they were."""
        if not self.ranks or len(self._world) > 1:
            return ""
        observed = self._world - self.ranks
        return (
            f"only {RankSet(observed).phrase()} was observed and not {self.ranks.phrase()}, so no "
            "ranks were compared"
            if observed
            else f"{self.ranks.phrase()} were not observed, so no ranks were compared"
        )


class UnobservedThings(Watch):
    """Lists each once, with the ranks that said so."""

    kinds = (Unobserved,)

    def __init__(self, *_: Any) -> None:  # noqa: ANN401 (it judges nothing)
        """Nothing is missed yet."""
        self._ranks: dict[tuple[str, str, str], set[int]] = {}

    @property
    def not_checked(self) -> dict[str, str]:
        """What is not observed, and why."""
        reasons: dict[str, list[str]] = {}
        for (what, probe, reason), ranks in self._ranks.items():
            text = f"probe {probe} of {RankSet(ranks).phrase()} does not observe it: {reason}"
            reasons.setdefault(what, []).append(text)
        return {what: "; ".join(texts) for what, texts in reasons.items()}

    def feed(self, event: Unobserved) -> None:  # type: ignore[override]
        """Take note of what a rank does not see."""
        key = event.what, event.probe, event.reason
        self._ranks.setdefault(key, set()).add(event.rank)


# ---

_OF_STEPS: Final = (AuxLoss, GradientSums, LossWeights, SequenceUse)
"""Nothing of these is recorded where the ranks leave the steps out."""


class Subjects(Watch):
    """Knows of which checks a run has something to look at, where they say what that is."""

    kinds = (
        CounterWritten,
        LossWeights,
        ModelFed,
        ModelPlan,
        Routing,
        ScheduleState,
        SequenceUse,
    )

    def __init__(self, judges: Judges) -> None:
        """Nothing was seen yet."""
        self._judges = judges
        self._unseen = {check.code: check for check in judges.with_subject}

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks whose subject was never seen."""
        return {code: check.absent for code, check in self._unseen.items()}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        for code, check in tuple(self._unseen.items()):
            if self._judges.is_concerned(check, event):
                del self._unseen[code]


class LeftOut(Watch):
    """Knows which checks a run of the light profile cannot have."""

    kinds = ()

    def __init__(self, judges: Judges, *, only_start: bool) -> None:
        """Take note of whether the ranks look at the steps of their models."""
        self._judges = judges
        self._only_start = only_start

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks of what happens in steps, if these are left out."""
        if not self._only_start:
            return {}
        return {check.code: LIGHT for kind in _OF_STEPS for check in self._judges.needing(kind)}
