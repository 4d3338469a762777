"""Curves up to a step, and the curve that a run has in the end, over its attempts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distdiag.metrics.runs import Run
from distdiag.metrics.series import Curves, Series


def up_to(curves: Curves, step: float) -> Curves:
    """Return the curves without what was logged after a step."""
    cut = {name: _where(series, series.steps <= step) for name, series in curves.series.items()}
    return replace(curves, series={name: series for name, series in cut.items() if len(series)})


def steps_of(run: Run) -> tuple[float, float]:
    """Return the least and the largest step of a run, of whatever series; 0 if there is none."""
    steps = [s.steps[np.isfinite(s.steps)] for c in run.curves for s in c.series.values()]
    every = np.concatenate([*steps, np.empty(0)])
    return (float(every.min()), float(every.max())) if every.size else (0.0, 0.0)


def settled(run: Run, rank: int | None) -> Curves | None:
    """Return the curves of a rank as they count: a later attempt replaces what it repeats.

    None if the run has no such rank.
    """
    attempts = run.by_rank().get(rank)
    if not attempts:
        return None
    series: dict[str, Series] = {}
    for curves in attempts:
        for name, later in curves.series.items():
            if not len(later):
                continue
            earlier = series.get(name)
            series[name] = later if earlier is None else _followed(earlier, later)
    roles = {role: name for curves in attempts for role, name in curves.roles.items()}
    return replace(attempts[-1], series=series, roles=roles)


def _followed(earlier: Series, later: Series) -> Series:
    kept = _where(earlier, earlier.steps < later.steps.min())
    return Series(
        name=later.name,
        steps=np.concatenate([kept.steps, later.steps]),
        values=np.concatenate([kept.values, later.values]),
        lines=np.concatenate([kept.lines, later.lines]),
    )


def _where(series: Series, kept: np.ndarray) -> Series:
    times = None if series.times is None else series.times[kept]
    return Series(series.name, series.steps[kept], series.values[kept], series.lines[kept], times)
