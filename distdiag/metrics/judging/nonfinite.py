"""NaN and infinities: where they begin, on which ranks, and what grew before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.observation import (
    Kind,
    Observation,
    Point,
    spell_step,
    spell_value,
)
from distdiag.metrics.judging.telling import nearest, observe, point, raw_point
from distdiag.metrics.runs import Run, Track, beside

GROWTH: Final = 3.0
"""So many times the median of the values before counts as growth: the largest of twenty values with
a spread of 40 % (gradient norms of healthy runs) stays below it."""
WINDOW: Final = 20
LOOK: Final = (
    "Look at the batch and the learning rate of this step, and at what can overflow or divide by "
    "zero. torch.autograd.set_detect_anomaly(True) names the operation; distdiag check names the "
    "first tensor."
)


def look(run: Run) -> Iterator[Observation]:
    """Tell of each series where it is first not finite."""
    for track in run.all_tracks():
        bad = np.flatnonzero(~np.isfinite(track.series.values))
        if bad.size:
            yield _observation(track, bad)


def _observation(track: Track, bad: np.ndarray) -> Observation:
    first = int(bad[0])
    values, steps = track.series.values, track.series.steps
    later = np.flatnonzero(np.isfinite(values[first:]))
    recovers = bool(later.size)
    begin = float(steps[first])
    what = f"{track.series.name} is {spell_value(float(values[first]))}"
    where = f"at step {spell_step(begin)}"
    if recovers:
        extent = f" and at {bad.size - 1} more of {len(values)} values" if bad.size > 1 else ""
        extent += f"; it is finite again at step {spell_step(float(steps[first + later[0]]))}"
    else:
        extent = " and stays so to the end" if bad.size > 1 else ", the last value of the log"
    grown = tuple(_grown_before(track, begin))
    before = f". Before it, {' and '.join(text for text, _ in grown)}" if grown else ""
    points = (raw_point(track, first), *(each for _, each in grown))
    texts = (f"{what} {where}{extent}{before}", _look_next(track))
    until = float(steps[first + later[0]]) if recovers else None
    return observe(
        track, Kind.NOT_FINITE, _severity(track, bad, recovers), texts, points, (begin, until)
    )


def _severity(track: Track, bad: np.ndarray, recovers: bool) -> Severity:
    """Judge by the role: the loss must be finite; gradients under a loss scale may overflow."""
    if track.role == "loss":
        return Severity.WARNING if recovers else Severity.ERROR
    if track.role == "val_loss":
        return Severity.WARNING
    if track.role != "grad_norm" or recovers:
        # A loss scale is found by letting gradients overflow: such steps are skipped.
        return Severity.INFO
    return Severity.ERROR if bad.size > 1 and _ends_with(track, bad) else Severity.WARNING


def _ends_with(track: Track, bad: np.ndarray) -> bool:
    return int(bad[-1]) == len(track.series) - 1


def _look_next(track: Track) -> str:
    if track.role == "grad_norm" and beside(track, "loss_scale") is not None:
        return "A loss scale lets single gradients overflow: look whether it keeps falling."
    return (
        LOOK if track.role in ("loss", "val_loss", "grad_norm") else "Look at how it is computed."
    )


def _grown_before(track: Track, step: float) -> Iterator[tuple[str, Point]]:
    """Yield what left its level in the values before a step."""
    for role in ("grad_norm", "loss"):
        other = beside(track, role)
        if other is None or not len(other):
            continue
        last = nearest(other, step)
        window = other.values[max(last - 2 * WINDOW, 0) : last + 1]
        if len(window) < 5 or other.steps[last] > step:
            continue
        usual = float(np.median(window))
        peak = last - len(window[-WINDOW:]) + 1 + int(np.argmax(window[-WINDOW:]))
        size = float(other.values[peak])
        if usual > 0 and size > GROWTH * usual:
            text = (
                f"{other.series.name} was {spell_value(size)} at step "
                f"{spell_step(float(other.steps[peak]))} (median before: {spell_value(usual)})"
            )
            yield text, point(other, peak)
