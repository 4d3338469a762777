"""A loss scale that collapses: gradients overflow at any scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.telling import at_most_note, observe, point
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Floats

HALVINGS: Final = 6
WITHIN: Final = 30
"""A scale that works is halved once in hundreds of steps (it is doubled after 1,000 or 2,000 good
ones); six halvings in 30 values are no search for it, but for those of the first values."""
SEARCH_VALUES: Final = 50
"""At the start, a scale of 2 ** 16 to 2 ** 32 falls to where it works."""
TINY: Final = 1.0
"""At a scale of 1 the scale protects nothing; torch, DeepSpeed and Megatron-LM end there."""
LOOK: Final = (
    "Gradients overflow whatever the scale: look for inf or NaN in the loss at this step (distdiag "
    "check names the first tensor). bfloat16 needs no loss scale."
)


def look(run: Run) -> Iterator[Observation]:
    """Tell where a loss scale collapses."""
    for track in run.tracks("loss_scale"):
        yield from _collapse(track)


def _collapse(track: Track) -> Iterator[Observation]:
    scales = track.values
    if len(scales) < 3 or (scales <= 0).any() or scales.max() <= TINY:
        return
    found = _burst(np.log2(scales))
    if found is None:
        return
    first, halvings = found
    is_tiny = scales[-1] <= TINY
    step = float(track.steps[first])
    text = (
        f"{track.series.name} falls from {spell_value(float(scales[first - 1]))} to "
        f"{spell_value(float(scales[-1]))} from step {spell_step(step)} on and does not recover: "
        f"each of {halvings:.0f} halvings is a step whose gradients overflowed and was skipped"
    )
    severity = at_most_note(track, Severity.ERROR if is_tiny else Severity.WARNING)
    points = (point(track, first), point(track, len(track) - 1))
    yield observe(track, Kind.LOSS_SCALE, severity, (text, LOOK), points, (step, None))


def _burst(logs: Floats) -> tuple[int, float] | None:
    """Return the first value of a fall that nothing answers, and its halvings; None if none."""
    rises = np.flatnonzero(np.diff(logs) > 0)
    begin = int(rises[-1]) + 1 if rises.size else 0
    falls = begin + 1 + np.flatnonzero(np.diff(logs[begin:]) < 0)
    if logs[-1] > np.log2(TINY):
        falls = falls[falls >= SEARCH_VALUES]
    for first in falls.tolist():
        end = min(first + WITHIN, len(logs)) - 1
        if logs[first - 1] - logs[end] >= HALVINGS:
            return first, float(logs[first - 1] - logs[-1])
    return None
