"""Divergence: a loss leaves its trend and does not come back; gradients that explode."""

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
from distdiag.metrics.judging.spikes import spikes_of
from distdiag.metrics.judging.telling import at_most_note, nearest, observe, point
from distdiag.metrics.judging.trends import Rise, find_rise
from distdiag.metrics.runs import Run, Track, beside

LOST: Final = 0.5
"""Half of what training had gained is gone."""
LARGE: Final = 0.3
"""A loss that ends 30 % above its lowest level: cyclic learning rates move losses by up to 20 %."""
MANY_TIMES: Final = 2.0
HUGE: Final = 10.0
"""A loss that never fell is told if it ends so many times above its start: in games of two networks
that name no such thing the loss of one rises from 0.7 to some units while both learn."""
FIRST: Final = 10
"""Before so many values there is no trend."""
TURN_OF_RATE: Final = 1.5
"""A learning rate that rises by half while the loss does moves the loss, too."""
MANY_SIGMAS: Final = 8.0
EXPLODED: Final = 100.0
"""So many times the median before: healthy gradient norms fall by up to 30 times from their first
steps, and do not rise."""
CERTAIN: Final = 1000.0
"""Growth by so much needs no estimate of the noise: short series tell it, too."""
BEFORE: Final = 30
"""A gradient norm that spikes so many values before the loss rises is told with it."""
LOOK: Final = (
    "Look at the learning rate and the batch of this step. A lower rate, a longer warm-up and "
    "clipping of gradients bound such a step; a checkpoint from before it can be resumed."
)
NO_TREND: Final = frozenset(
    [
        "g",
        "d",
        "gen",
        "generator",
        "disc",
        "discriminator",
        "adv",
        "adversarial",
        "policy",
        "pg",
        "actor",
        "critic",
        "value",
        "vf",
    ]
)
"""Words in the names of losses that two networks, or an agent and its world, move against one
another: they have no trend to leave."""


def look(run: Run) -> Iterator[Observation]:
    """Tell where losses diverge and gradients explode."""
    for track in run.tracks("loss"):
        if (rise := find_rise(track.values)) is not None:
            yield from _divergence(track, rise)
    for track in run.tracks("grad_norm"):
        yield from _explosion(track)


def has_trend(track: Track) -> bool:
    """Tell whether the loss of correct training falls: not of games, not of agents."""
    words = "".join(c if c.isalnum() else " " for c in track.series.name.lower()).split()
    return not NO_TREND.intersection(words) and beside(track, "reward") is None


def _divergence(track: Track, rise: Rise) -> Iterator[Observation]:
    severity = at_most_note(track, _severity(track, rise))
    has_fallen = rise.drop > 0 and rise.begin >= FIRST and has_trend(track)
    if rise.size < MANY_SIGMAS * rise.sigma or not has_fallen:
        is_huge = has_trend(track) and rise.end > HUGE * (rise.level + max(rise.drop, 0.0))
        severity = Severity.WARNING if is_huge and rise.level > 0 else Severity.INFO
    if severity is Severity.INFO and rise.size < 0.1 * abs(rise.level):
        return
    begin = float(track.steps[rise.begin])
    name = track.series.name
    text = (
        f"{name} leaves its trend at step {spell_step(begin)} and does not come back: its lowest "
        f"level is {spell_value(rise.level)}, it ends at {spell_value(rise.end)} "
        f"(noise: {spell_value(rise.sigma)})"
    )
    points = [point(track, rise.begin), point(track, len(track) - 1)]
    if (spike := norm_before(track, rise.begin)) is not None:
        points.append(spike)
        text += f". {spike.series} spiked to {spike.value} at step {spell_step(spike.step)}"
        text += ", before the loss rose" if spike.step < begin else ", at the same step"
    if _rate_rises(track, rise.begin):
        text += ". The learning rate rises at that time"
    yield observe(track, Kind.DIVERGENCE, severity, (text, LOOK), tuple(points), (begin, None))


def _severity(track: Track, rise: Rise) -> Severity:
    relative = rise.size / abs(rise.level) if rise.level else np.inf
    gained = rise.size / rise.drop if rise.drop > 0 else 0.0
    if (gained > LOST and relative > LARGE) or relative > MANY_TIMES:
        return Severity.ERROR
    if relative > LARGE and not _rate_rises(track, rise.begin):
        return Severity.WARNING
    return Severity.INFO


def norm_before(track: Track, begin: int) -> Point | None:
    """Return the gradient norm that spiked first in the values before an index, or at it."""
    norms = beside(track, "grad_norm")
    if norms is None or not len(norms):
        return None
    step = float(track.steps[begin])
    reach = float(track.steps[max(begin - BEFORE, 0)])
    for spike in spikes_of(norms):
        if reach <= norms.steps[spike.peak] <= step:
            return point(norms, spike.peak)
    return None


def _rate_rises(track: Track, begin: int) -> bool:
    rates = beside(track, "lr")
    if rates is None or not len(rates):
        return False
    at = nearest(rates, float(track.steps[begin]))
    window = max(len(rates) // 20, 2)
    before, after = rates.values[max(at - window, 0)], rates.values[at : at + window].max()
    return bool(after > TURN_OF_RATE * before)


def _explosion(track: Track) -> Iterator[Observation]:
    rise = find_rise(np.log(track.values)) if (track.values > 0).all() else None
    if rise is None:
        return
    times = float(np.exp(rise.size))
    if times < EXPLODED:
        return
    begin = float(track.steps[rise.begin])
    text = (
        f"{track.series.name} grows {times:.3g} times from step {spell_step(begin)} on: from a "
        f"level of {spell_value(float(np.exp(rise.level)))} to "
        f"{spell_value(float(np.exp(rise.end)))}, and does not come back"
    )
    severity = Severity.ERROR if times >= CERTAIN else at_most_note(track, Severity.ERROR)
    points = (point(track, rise.begin), point(track, len(track) - 1))
    yield observe(track, Kind.EXPLOSION, severity, (text, LOOK), points, (begin, None))
