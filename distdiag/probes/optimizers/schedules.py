"""How often learning-rate schedulers are advanced for each optimizer step, how far, by what."""

import math
import sys
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch.optim import lr_scheduler

from distdiag.events.base import CallSite
from distdiag.events.data import MetricGiven, ScheduleState
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded, guarded_if
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_PLANS: Final = (
    "num_training_steps",
    "total_steps",
    "max_steps",
    "num_steps",
    "max_iters",
    "total",
)
"""How programs call the number of steps that they make a schedule for. It is believed where the
rate stays the same once the scheduler was advanced so often."""
_LEAST_LOOK: Final = 16
_MOST_COURSES: Final = 64
_MOST_VALUES: Final = 64
"""So many values of a metric are written down; those that follow at ever longer distances."""


@dataclass(slots=True)
class _Course:
    """What one scheduler has done so far; the scheduler itself may be gone."""

    name: str
    scheduler: weakref.ref[Any]
    site: CallSite
    num_planned: int = 0
    num_named: int = 0
    follows_metric: bool = False
    value: float = math.nan
    num_values: int = 0
    num_advances: int = 0
    num_since_step: int = 0
    num_steps: int = 0
    least_pace: int = -1
    greatest_pace: int = -1
    last_pace: int = 0
    peak_rate: float = 0.0
    last_rate: float = 0.0
    settled_at: int = 0

    @property
    def believed_plan(self) -> int:
        """The number of steps in the program's own words, if the rate stays the same after it."""
        pace = max(self.last_pace, 1)
        has_ended = 0 < self.num_named < self.num_advances
        return self.num_named if has_ended and self.settled_at <= self.num_named // pace + 1 else 0

    def see(self, rate: float) -> None:
        """Take note of a rate that holds from now on."""
        self.peak_rate = max(self.peak_rate, rate)
        if rate != self.last_rate:
            self.last_rate, self.settled_at = rate, self.num_steps


class Schedules(Probe):
    """Writes down how far each scheduler is, after ever longer times and at the end."""

    name: ClassVar[str] = "schedules"

    def __init__(
        self, recorder: Recorder, stepped: Signal[torch.optim.Optimizer], step_ended: Signal[[]]
    ) -> None:
        super().__init__(recorder)
        self._optimizer_stepped = stepped
        self._step_ended = step_ended
        self._courses: WeakMap[Any, _Course] = WeakMap()
        self._all: deque[_Course] = deque(maxlen=_MOST_COURSES)
        self._counts: dict[str, int] = {}
        self._next_look = _LEAST_LOOK

    def _install(self) -> None:
        kind = lr_scheduler.LRScheduler
        # The warnings of `step` name the line of its caller: it is left alone if possible.
        name = "_update_lr" if "_update_lr" in vars(kind) else "step"
        self._patches.wrap(kind, name, self._call_after(self._advanced))
        # It compares the value as a plain number, which costs no wait for a device.
        plateau = lr_scheduler.ReduceLROnPlateau
        name = "_is_better" if "_is_better" in vars(plateau) else "is_better"
        self._patches.wrap(plateau, name, self._call_before(self._given))
        self._subscribe(self._optimizer_stepped, self._stepped)
        self._subscribe(self._step_ended, self._after_step)

    @guarded
    def flush(self) -> None:
        """Write down how far all have come."""
        self._write_all()

    @guarded
    def _advanced(self, _: object, scheduler: object, /, *__: object, **___: object) -> None:
        course = self._courses.get(scheduler)
        if course is None:
            self._begin(scheduler, sys._getframe(3))  # the constructor takes the first step
            return
        self._advance(course, sys._getframe(3))

    @guarded
    def _given(self, scheduler: object, value: float, /, *_: object, **__: object) -> None:
        frame = sys._getframe(3)
        course = self._courses.get(scheduler) or self._begin(scheduler, frame)
        course.follows_metric = True
        is_same = course.num_since_step > 0 and course.value == value
        if not is_same:
            course.num_since_step = 0
        self._advance(course, frame)
        if not is_same:
            course.value = value
            self._write_value(course)

    def _begin(self, scheduler: object, frame: FrameType) -> _Course:
        rate, kind = _rate(scheduler), type(scheduler).__name__
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        course = _Course(
            kind if number == 1 else f"{kind}#{number}",
            weakref.ref(scheduler),
            CallSite(frames_of(frame, self.recorder.main_script)),
            _num_planned(scheduler),
            _num_named(scheduler),
            peak_rate=rate,
            last_rate=rate,
        )
        self._courses[scheduler] = course
        self._all.append(course)
        return course

    def _advance(self, course: _Course, frame: FrameType) -> None:
        if course.num_advances == 0:
            course.site = CallSite(frames_of(frame, self.recorder.main_script))
        course.num_advances += 1
        course.num_since_step += 1
        course.see(_rate(course.scheduler()))

    def _write_value(self, course: _Course) -> None:
        number, course.num_values = course.num_values, course.num_values + 1
        if number < _MOST_VALUES or not number & (number - 1):
            self.recorder.event(
                MetricGiven,
                name=course.name,
                number=number,
                value=course.value,
                site=course.site,
            )

    @guarded_if("_all")
    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        for course in self._all:
            scheduler = course.scheduler()
            # A wrapper of an optimizer has the same list.
            own = None if scheduler is None else scheduler.optimizer.param_groups
            if own is not None and own is optimizer.param_groups:
                self._count_step(course)

    @guarded_if("_all")
    def _after_step(self) -> None:
        if self.recorder.step >= self._next_look:
            self._next_look *= 2
            self._write_all()

    def _count_step(self, course: _Course) -> None:
        course.see(_rate(course.scheduler()))  # another scheduler may have set it
        pace, course.num_since_step = course.num_since_step, 0
        course.num_steps += 1
        if course.num_steps == 1 or not pace:
            return  # it is advanced after the step, and not after each one
        # What comes last may be cut off by the end of the schedule, and counts if it does not.
        before, course.last_pace = course.last_pace, pace
        if before:
            is_first = course.least_pace < 0
            course.least_pace = before if is_first else min(course.least_pace, before)
            course.greatest_pace = max(course.greatest_pace, before)

    def _write_all(self) -> None:
        for course in self._all:
            if course.num_steps < 2:
                continue
            is_new = course.least_pace < 0
            self.recorder.event(
                ScheduleState,
                name=course.name,
                num_advances=course.num_advances,
                num_steps=course.num_steps,
                num_planned=course.num_planned or course.believed_plan,
                follows_metric=course.follows_metric,
                least_pace=course.last_pace if is_new else course.least_pace,
                greatest_pace=course.last_pace if is_new else course.greatest_pace,
                peak_rate=course.peak_rate,
                last_rate=course.last_rate,
                settled_at=course.settled_at,
                site=course.site,
            )


def _num_planned(scheduler: object) -> int:
    """Return the number of training steps that a schedule was made with, 0 if it does not say."""
    for function in getattr(scheduler, "lr_lambdas", ()):
        planned = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(planned, int):
            return planned
    half_period = getattr(scheduler, "T_max", 0)  # of torch's cosine: the rate rises again then
    return half_period if isinstance(half_period, int) else 0


def _num_named(scheduler: object) -> int:
    """Return what a scheduler of the program's own calls like a number of steps, or 0."""
    values = dict(vars(scheduler))
    for function in values.get("lr_lambdas", ()):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        held = zip(names, getattr(function, "__closure__", None) or (), strict=False)
        for name, cell in held:
            with suppress(ValueError):  # the variable has no value yet
                values[name] = cell.cell_contents
    found = (values.get(name) for name in _PLANS)
    return next((each for each in found if isinstance(each, int) and each > 0), 0)


def _rate(scheduler: Untyped) -> float:
    """Return the largest rate that is a plain number; one on a device is not read."""
    groups = scheduler.optimizer.param_groups
    rates = [rate for group in groups if isinstance(rate := group.get("lr"), int | float)]
    return max(rates, default=float("nan"))
