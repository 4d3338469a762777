"""A validation loss that rises while the training loss falls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.noise import noise_of
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.telling import at_most_note, observe, point
from distdiag.metrics.runs import Run, Track, beside

SIGMAS: Final = 5.0
FEWEST: Final = 6
"""Noise of fewer values is not known, and a minimum of fewer is none."""
AFTER: Final = 3
"""So many values after the minimum must lie above it."""
LARGE: Final = 0.1
"""A validation loss 10 % above its minimum is more than a change of data order makes (1 to 3 %)."""
LOOK: Final = (
    "Keep the checkpoint nearest to this step. More data, regularisation or fewer epochs help; if "
    "it rises from the start, compare how training and validation prepare their data."
)


def look(run: Run) -> Iterator[Observation]:
    """Tell where the validation loss has its minimum, if it rises afterwards."""
    for track in run.tracks("val_loss"):
        if len(track) >= FEWEST:
            yield from _overfitting(track)


def _overfitting(track: Track) -> Iterator[Observation]:
    values = track.values
    lowest = int(np.argmin(values))
    after = values[lowest + 1 :]
    if len(after) < AFTER:
        return
    least, end = float(values[lowest]), float(np.median(values[-AFTER:]))
    sigma = noise_of(values)
    needed = max(SIGMAS * sigma, LARGE / 2 * abs(least))
    if end <= least or end - least < needed or after.min() < least:
        return
    loss = beside(track, "loss")
    if loss is None or not _falls(loss, float(track.steps[lowest])):
        return
    step = float(track.steps[lowest])
    text = (
        f"{track.series.name} is lowest at step {spell_step(step)} ({spell_value(least)}) and "
        f"rises to {spell_value(end)} by step {spell_step(float(track.steps[-1]))}, while "
        f"{loss.series.name} goes on to fall: the model learns its training data by heart"
    )
    is_large = end - least > LARGE * abs(least) and lowest > 0
    severity = at_most_note(track, Severity.WARNING if is_large else Severity.INFO)
    points = (point(track, lowest), point(track, len(track) - 1))
    yield observe(track, Kind.OVERFITTING, severity, (text, LOOK), points, (step, None))


def _falls(loss: Track, step: float) -> bool:
    later = loss.values[loss.steps >= step]
    if len(later) < 2 * AFTER:
        return False
    third = max(len(later) // 3, AFTER)
    fallen = float(np.median(later[:third]) - np.median(later[-third:]))
    return fallen > 2.0 * noise_of(later) / math.sqrt(third)
