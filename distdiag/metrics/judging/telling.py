"""How a judge tells what it saw in a track."""

from __future__ import annotations

from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.observation import Kind, Observation, Point, spell_value
from distdiag.metrics.runs import Track

FEWEST: Final = 20
"""Noise that is estimated from fewer values is off by more than a quarter (its relative error is
about 1.17 / sqrt(n) for the median of absolute deviations): what rests on it is a note."""


def point(track: Track, index: int) -> Point:
    """Return what the log says at an index of the finite values of a track."""
    return raw_point(track, int(track.kept[index]))


def raw_point(track: Track, place: int) -> Point:
    """Return what the log says at a place of the series, which may be NaN."""
    series = track.series
    return Point(
        file=str(track.curves.source),
        line=int(series.lines[place]),
        series=series.name,
        step=float(series.steps[place]),
        value=spell_value(float(series.values[place])),
    )


def observe(
    track: Track,
    kind: Kind,
    severity: Severity,
    texts: tuple[str, str],
    points: tuple[Point, ...] = (),
    steps: tuple[float | None, float | None] = (None, None),
) -> Observation:
    """Make an observation of a track; `texts` are the message and what to look at next."""
    message, look_next = texts
    return Observation(
        kind=kind,
        severity=severity,
        run=track.run,
        series=track.series.name,
        message=message,
        look_next=look_next,
        ranks=track.ranks,
        attempt=track.curves.attempt,
        step=steps[0],
        last_step=steps[1],
        evidence=points,
    )


def at_most_note(track: Track, severity: Severity) -> Severity:
    """Return the severity; a note where there are too few values to know the noise."""
    return severity if len(track) >= FEWEST else Severity.INFO


def nearest(track: Track, step: float) -> int:
    """Return the index of the last finite value at or before a step; 0 if there is none."""
    return max(int(np.searchsorted(track.steps, step, side="right")) - 1, 0)
