"""Outputs that collapse: an entropy that goes to zero, a reward that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.noise import running_median
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.telling import FEWEST, at_most_note, observe, point
from distdiag.metrics.judging.trends import find_rise
from distdiag.metrics.runs import Run, Track, beside

NOTHING: Final = 0.01
"""One hundredth of what it was at first: the outputs are one and the same."""
LOST: Final = 0.5
"""Half of what the reward had gained is gone."""
LOOK_ENTROPY: Final = (
    "Look at samples of the output: are they one token, or one text? A larger entropy or KL term, "
    "a lower learning rate and a higher temperature keep them apart."
)
LOOK_REWARD: Final = (
    "Look at the KL divergence, the entropy and the gradient norm at this step, and at samples of "
    "the output from before and after."
)


def look(run: Run) -> Iterator[Observation]:
    """Tell of entropies and rewards that collapse."""
    for track in run.tracks("entropy"):
        if len(track) > 3:
            yield from _entropy(track)
    for track in run.tracks("reward"):
        if len(track) > FEWEST:
            yield from _reward(track)


def _entropy(track: Track) -> Iterator[Observation]:
    level = running_median(track.values, 2)
    start = float(np.median(track.values[: max(3, len(track) // 50)]))
    if start <= 0:
        return
    above = np.flatnonzero(level > NOTHING * start)
    first = int(above[-1]) + 1 if above.size else 0
    if first >= len(track) - 2:
        return
    step, end = float(track.steps[first]), float(np.median(track.values[first:]))
    rewarded = _reward_rises(track)
    text = (
        f"{track.series.name} collapses: it falls below {NOTHING:.0%} of its start "
        f"({spell_value(start)}) at step {spell_step(step)} and stays at {spell_value(end)}"
    )
    text += ", while the reward goes on to rise" if rewarded else ""
    severity = Severity.INFO if rewarded else Severity.WARNING
    points = (point(track, first), point(track, len(track) - 1))
    texts = (text, LOOK_ENTROPY)
    severity = at_most_note(track, severity)
    yield observe(track, Kind.ENTROPY_COLLAPSE, severity, texts, points, (step, None))


def _reward_rises(track: Track) -> bool:
    reward = beside(track, "reward")
    if reward is None or len(reward) < FEWEST:
        return False
    third = len(reward) // 3
    return bool(np.median(reward.values[-third:]) > np.median(reward.values[:third]))


def _reward(track: Track) -> Iterator[Observation]:
    fall = find_rise(-track.values)
    if fall is None or fall.drop <= 0 or fall.size < LOST * fall.drop:
        return
    step = float(track.steps[fall.begin])
    text = (
        f"{track.series.name} collapses at step {spell_step(step)}: its best level was "
        f"{spell_value(-fall.level)}, it ends at {spell_value(-fall.end)} "
        f"(noise: {spell_value(fall.sigma)})"
    )
    points = (point(track, fall.begin), point(track, len(track) - 1))
    severity = at_most_note(track, Severity.WARNING)
    texts = (text, LOOK_REWARD)
    yield observe(track, Kind.REWARD_COLLAPSE, severity, texts, points, (step, None))
