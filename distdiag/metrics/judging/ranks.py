"""Ranks whose losses part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.noise import mad_sigma, running_median
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.telling import FEWEST, observe, point
from distdiag.metrics.judging.trends import departure
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Floats

SIGMAS: Final = 6.0
LARGE: Final = 0.1
"""Losses of ranks that see other data differ by some percent, throughout; a difference that comes
up later and is larger than a tenth of the loss is none of the data's."""
LOOK: Final = (
    "Look what this rank did at this step that the others did not: a step that was skipped, a "
    "batch it had alone, a collective that it missed. distdiag check compares the parameters."
)


def look(run: Run) -> Iterator[Observation]:
    """Compare the losses of the ranks of each attempt."""
    for role in ("loss", "grad_norm"):
        tracks = [t for t in run.tracks(role) if t.curves.rank is not None and len(t) > 1]
        for attempt in sorted({t.curves.attempt for t in tracks}):
            yield from _compare([t for t in tracks if t.curves.attempt == attempt])


def _compare(tracks: list[Track]) -> Iterator[Observation]:
    if len(tracks) < 2:
        return
    steps = tracks[0].steps
    for track in tracks[1:]:
        steps = np.intersect1d(steps, track.steps)
    if len(steps) < 3:
        return
    places = [np.searchsorted(t.steps, steps) for t in tracks]
    values = np.stack([t.values[at] for t, at in zip(tracks, places, strict=True)])
    equal = (values == values[0]).all(axis=0)
    if equal[: max(len(steps) // 10, 2)].all():
        if not equal.all():
            yield from _no_longer_equal(tracks, places, values, int(np.argmin(equal)))
    elif len(tracks) > 2 and len(steps) >= FEWEST:
        yield from _parting(tracks, places, values)


def _no_longer_equal(
    tracks: list[Track], places: list[npt.NDArray[np.intp]], values: Floats, at: int
) -> Iterator[Observation]:
    """Tell of a value that all ranks had alike, to the last digit, up to a step."""
    usual = np.unique(values[:, at], return_counts=True)
    most = usual[0][np.argmax(usual[1])]
    is_split = len(tracks) == 2
    for index, track in enumerate(tracks):
        if values[index, at] == most and not is_split:
            continue
        here = int(places[index][at])
        step = float(track.steps[here])
        text = (
            f"{track.series.name} of {track.ranks.phrase()} was that of the other ranks to the "
            f"last digit up to step {spell_step(float(track.steps[here - 1]))}; at step "
            f"{spell_step(step)} it is {track.values[here]:.8g}"
        )
        text += "" if is_split else f", and {most:.8g} on most others"
        points = (point(track, here),)
        yield observe(track, Kind.RANKS_PART, Severity.WARNING, (text, LOOK), points, (step, None))


def _parting(
    tracks: list[Track], places: list[npt.NDArray[np.intp]], values: Floats
) -> Iterator[Observation]:
    """Tell of a rank that leaves the middle of the others, by more than its noise, for good."""
    for index, track in enumerate(tracks):
        others = np.median(np.delete(values, index, axis=0), axis=0)
        apart = values[index] - others
        if not (others > 0).all():
            continue
        # The noise of a loss goes with its level.
        crossing = _crossing(apart / others)
        if crossing is None:
            continue
        first = departure(np.abs(apart / others), crossing)
        here = int(places[index][first])
        step, end = float(track.steps[here]), float(np.median(apart[-5:]))
        text = (
            f"{track.series.name} of {track.ranks.phrase()} parts from the other "
            f"{len(tracks) - 1} ranks at step {spell_step(step)} and stays apart: at the end it is "
            f"{spell_value(abs(end))} {'above' if end > 0 else 'below'} their median "
            f"({spell_value(float(others[-1]))})"
        )
        points = (point(track, here), point(track, int(places[index][-1])))
        yield observe(track, Kind.RANKS_PART, Severity.WARNING, (text, LOOK), points, (step, None))


def _crossing(apart: Floats) -> int | None:
    """Return the first value after which the difference stays outside of its earlier noise."""
    size = len(apart)
    level = running_median(apart, 3)
    early = apart[: max(size // 5, 8)]
    sigma = max(mad_sigma(early), float(np.abs(early - np.median(early)).max()) / 3.0)
    outside = np.abs(level - np.median(early)) > max(SIGMAS * sigma, LARGE)
    inside = np.flatnonzero(~outside)
    first = int(inside[-1]) + 1 if inside.size else size
    return first if size // 5 <= first <= size - 5 else None
