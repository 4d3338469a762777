"""Gradient norms that tell nothing: exactly zero, or one number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.noise import noise_of
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.plateaus import longest_row
from distdiag.metrics.judging.telling import at_most_note, observe, point
from distdiag.metrics.runs import Run, Track, beside

FEWEST_ZEROS: Final = 10
"""Single zeros come from batches that hold no label, or no advantage."""
MOSTLY: Final = 0.5
FALLEN: Final = 3.0
"""A loss that falls by three times its noise is trained: a norm of 0 is then one that is not
measured (Megatron-LM logs 0.000 where gradients are not clipped)."""
LOOK_ZERO: Final = (
    "Look for what cuts the backward pass: detach(), .data, torch.no_grad(), frozen parameters, "
    "labels that are all ignored; or an optimizer that has other parameters than the model."
)
LOOK_CONSTANT: Final = (
    "Log the norm before clipping (torch.nn.utils.clip_grad_norm_ returns it): what is logged now "
    "cannot show a spike."
)


def look(run: Run) -> Iterator[Observation]:
    """Tell of gradient norms of zero, and of norms that are always what they are clipped to."""
    for track in run.tracks("grad_norm"):
        yield from _zero(track)
        yield from _constant(track)


def _zero(track: Track) -> Iterator[Observation]:
    if not (track.values == 0).any():
        return
    begin, end = longest_row(np.where(track.values == 0, 0.0, np.arange(len(track)) + 1.0))
    if end - begin < FEWEST_ZEROS or track.values[begin] != 0:
        return
    whole = end - begin == len(track)
    first, last = float(track.steps[begin]), float(track.steps[end - 1])
    text = (
        f"{track.series.name} is exactly 0 in {end - begin} values in a row, from step "
        f"{spell_step(first)} to step {spell_step(last)}"
    )
    severity = Severity.WARNING
    if _is_trained(track, begin, end) or beside(track, "reward") is not None:
        text += ", while the loss goes on to change: it is not measured, or no batch has a gradient"
        severity = Severity.INFO
    points = (point(track, begin), point(track, end - 1))
    until = None if end == len(track) else float(track.steps[end])
    severity = at_most_note(track, severity) if not whole else severity
    yield observe(track, Kind.ZERO_GRADIENT, severity, (text, LOOK_ZERO), points, (first, until))


def _is_trained(track: Track, begin: int, end: int) -> bool:
    loss = beside(track, "loss")
    if loss is None:
        return True
    inside = (loss.steps >= track.steps[begin]) & (loss.steps <= track.steps[end - 1])
    values = loss.values[inside]
    if len(values) < FEWEST_ZEROS:
        return True
    third = len(values) // 3
    fallen = float(np.median(values[:third]) - np.median(values[-third:]))
    return fallen > FALLEN * noise_of(values) / math.sqrt(third)


def _constant(track: Track) -> Iterator[Observation]:
    distinct, counts = np.unique(track.values, return_counts=True)
    if not len(track) or float(distinct[np.argmax(counts)]) == 0:
        return
    most = int(np.argmax(counts))
    share = float(counts[most]) / len(track)
    # What is clipped is never above the value that it is clipped to.
    if share < MOSTLY or distinct[most] != distinct[-1] or len(track) < 2 * FEWEST_ZEROS:
        return
    text = (
        f"{track.series.name} is {spell_value(float(distinct[most]))} in {share:.0%} of the log "
        "and never above: it is logged after clipping"
    )
    index = int(np.flatnonzero(track.values == distinct[most])[0])
    steps = (float(track.steps[index]), None)
    points = (point(track, index),)
    texts = (text, LOOK_CONSTANT)
    yield observe(track, Kind.CONSTANT_GRADIENT, Severity.INFO, texts, points, steps)
