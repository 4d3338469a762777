"""What of models was compared, and so which checks of models have looked at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.event import Event
from distdiag.model_event import (
    ModelPlan,
    ModelState,
    Moment,
    OptimizerState,
    PartialRead,
    SliceSaved,
)
from distdiag.model_view import ContentView, ModelView, ScalingView
from distdiag.plan_event import PlanPatterns
from distdiag.random_event import RandomDraw, RandomState

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
