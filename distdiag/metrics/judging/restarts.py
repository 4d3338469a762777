"""Restarts: whether a run goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.noise import mad_sigma
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.telling import FEWEST, observe, point
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Curves, Floats

FIRST_VALUES: Final = 5
SIGMAS: Final = 6.0
FAR: Final = 0.15
"""A loss that restarts 15 % higher is no noise of a few batches; a warm-up of Adam's averages that
were lost moves it by some percent."""
AS_AT_START: Final = 0.7
"""A loss that is back at more than seven tenths of the way to where training began: its weights are
not those of the checkpoint."""
SAME_RATE: Final = 1e-3
"""Rates that are printed with three digits or more agree to this."""
OTHER_RATE: Final = 0.05
LOOK_LOSS: Final = (
    "Look whether the checkpoint was loaded: missing and unexpected keys, strict=False, the path, "
    "the state of the optimizer. distdiag check tells of parameters that a load left as they were."
)
LOOK_RATE: Final = (
    "Save and load scheduler.state_dict(), and give the scheduler as many steps as before."
)
LOOK_COUNTER: Final = (
    "If the schedule of the learning rate and the order of the data go by the step, they begin "
    "again, too: save the step with the checkpoint."
)
LOOK_STEPS: Final = "Steps between the checkpoint and the end of the attempt before are done twice."


def look(run: Run) -> Iterator[Observation]:
    """Compare each attempt with the one before it, on each rank."""
    for attempts in run.by_rank().values():
        for before, after in pairwise(attempts):
            yield from _compare(run.name, before, after)


def _pair(name: str, before: Curves, after: Curves, role: str) -> tuple[Track, Track] | None:
    first, second = before.of(role), after.of(role)
    if first is None or second is None:
        return None
    tracks = Track(name, before, first, role), Track(name, after, second, role)
    return tracks if len(tracks[0]) and len(tracks[1]) else None


def _compare(name: str, before: Curves, after: Curves) -> Iterator[Observation]:
    losses = _pair(name, before, after, "loss")
    if losses is None:
        return
    old, new = losses
    if _is_new_run(old, new):
        yield from _counter(old, new)
        return
    yield from _steps(old, new)
    yield from _loss(old, new)
    if (rates := _pair(name, before, after, "lr")) is not None:
        yield from _rate(*rates)


def _is_new_run(old: Track, new: Track) -> bool:
    """Tell whether the steps begin again, and the loss with them: no restart, but a fresh start."""
    spacing = _spacing(old)
    begins_again = new.steps[0] <= old.steps[0] + spacing
    return bool(begins_again) and len(old) > 2


def _counter(old: Track, new: Track) -> Iterator[Observation]:
    """Tell of steps that begin again although the loss goes on where it was."""
    if len(old) < FEWEST or len(new) < FIRST_VALUES:
        return
    start, end = float(np.median(old.values[:3])), float(np.median(old.values[-FIRST_VALUES:]))
    now = float(np.median(new.values[:FIRST_VALUES]))
    if start <= end or now - end > (1.0 - AS_AT_START) * (start - end):
        return
    step = float(new.steps[0])
    text = (
        f"attempt {new.curves.attempt} counts its steps from {spell_step(step)} again, but its "
        f"{new.series.name} goes on at {spell_value(now)}, where attempt {old.curves.attempt} was "
        f"({spell_value(end)}): the weights are loaded, the number of the step is not"
    )
    points = (point(old, len(old) - 1), point(new, 0))
    yield observe(
        new, Kind.RESTART_STEPS, Severity.INFO, (text, LOOK_COUNTER), points, (step, None)
    )


def _spacing(track: Track) -> float:
    return float(np.median(np.diff(track.steps))) if len(track) > 1 else 1.0


def _steps(old: Track, new: Track) -> Iterator[Observation]:
    last, first = float(old.steps[-1]), float(new.steps[0])
    if first <= last:
        text = (
            f"attempt {new.curves.attempt} repeats steps {spell_step(first)} to {spell_step(last)} "
            f"of attempt {old.curves.attempt}"
        )
    elif first > last + 1.5 * _spacing(old):
        text = (
            f"attempt {new.curves.attempt} begins at step {spell_step(first)}, but attempt "
            f"{old.curves.attempt} ends at step {spell_step(last)}: the log lacks what is between"
        )
    else:
        return
    points = (point(old, len(old) - 1), point(new, 0))
    texts = (text, LOOK_STEPS)
    yield observe(new, Kind.RESTART_STEPS, Severity.INFO, texts, points, (first, None))


def _loss(old: Track, new: Track) -> Iterator[Observation]:
    """Compare the first values of an attempt with what the one before had at these steps."""
    first = new.values[:FIRST_VALUES]
    around = _around(old, float(new.steps[0]))
    if len(around) < FIRST_VALUES or not len(first):
        return
    level, sigma = float(np.median(around)), mad_sigma(around - np.median(around))
    now = float(np.median(first))
    start = float(np.median(old.values[:3]))
    above = now - level
    if above < max(SIGMAS * sigma / np.sqrt(len(first)), FAR * abs(level)):
        return
    step = float(new.steps[0])
    text = (
        f"after the restart at step {spell_step(step)}, {new.series.name} is {spell_value(now)}; "
        f"before, it was {spell_value(level)} there (noise: {spell_value(sigma)})"
    )
    is_lost = start > level and above > AS_AT_START * (start - level)
    if is_lost:
        text += f". Training began at {spell_value(start)}: the weights are not loaded"
    severity = Severity.ERROR if is_lost else Severity.WARNING
    if len(old) < FEWEST:
        severity = Severity.INFO
    points = (point(old, len(old) - 1), point(new, 0))
    yield observe(new, Kind.RESTART_LOSS, severity, (text, LOOK_LOSS), points, (step, None))


def _around(old: Track, step: float) -> Floats:
    """Return the values of the attempt before near a step, or its last ones."""
    at = int(np.searchsorted(old.steps, step))
    begin = max(min(at, len(old)) - 4 * FIRST_VALUES, 0)
    return old.values[begin : at + FIRST_VALUES]


def _rate(old: Track, new: Track) -> Iterator[Observation]:
    """Tell of a schedule that begins anew, or has other values at the same steps."""
    first = float(new.steps[0])
    same = np.searchsorted(old.steps, first)
    is_shared = same < len(old) and old.steps[same] == first
    then = float(old.values[same]) if is_shared else float(old.values[-1])
    now = float(new.values[0])
    allowed = OTHER_RATE if is_shared else 0.5
    if abs(now - then) <= allowed * max(abs(then), abs(now)):
        return
    began = float(old.values[0])
    anew = abs(now - began) <= SAME_RATE * abs(began) and abs(then - began) > OTHER_RATE * abs(then)
    text = (
        f"after the restart at step {spell_step(first)}, {new.series.name} is {spell_value(now)}; "
        f"before, it was {spell_value(then)} at step "
        f"{spell_step(first if is_shared else float(old.steps[-1]))}"
    )
    text += ". It is what the schedule began with: the schedule starts anew" if anew else ""
    is_sure = anew or (is_shared and abs(now - then) > 0.5 * max(abs(then), abs(now)))
    severity = Severity.WARNING if is_sure else Severity.INFO
    points = (point(old, min(int(same), len(old) - 1)), point(new, 0))
    yield observe(new, Kind.RESTART_RATE, severity, (text, LOOK_RATE), points, (first, None))
