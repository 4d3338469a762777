"""Speed: steps that get slower, stalls that come again, and ranks that others wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from distdiag.findings.finding import Severity
from distdiag.metrics.judging.noise import mad_sigma
from distdiag.metrics.judging.observation import Kind, Observation, spell_step, spell_value
from distdiag.metrics.judging.telling import FEWEST, at_most_note, observe, point
from distdiag.metrics.judging.trends import find_rise
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Floats

SLOWER: Final = 1.15
MUCH_SLOWER: Final = 1.5
"""Clocks of GPUs and shared networks move step times by 10 %; half as long again is no noise."""
WARMUP: Final = 10
"""The first steps compile, allocate and fill caches."""
STALL: Final = 2.0
FEWEST_STALLS: Final = 4
EVEN: Final = 0.2
"""Gaps between stalls differ by less than a fifth where something is done every so many steps."""
WORTH: Final = 0.05
"""What costs less than a twentieth of the time is not told."""
STRAGGLING: Final = 1.15
MUCH: Final = 1.3
LOOK_SLOWER: Final = (
    "Look for what grows: memory and its fragmentation, lists kept on the device, data that is "
    "read from a slower place, longer sequences; or a GPU that is throttled (nvidia-smi -q -d "
    "PERFORMANCE). distdiag dump shows where the ranks are."
)
LOOK_STALLS: Final = (
    "Look what the program does every so many steps: checkpoints, evaluation, garbage collection, "
    "data workers that start again with each epoch (persistent_workers=True)."
)
LOOK_RANK: Final = (
    "Compare this rank's host and GPU with the others (clocks, temperature, other jobs), and how "
    "much data it is given."
)


def look(run: Run) -> Iterator[Observation]:
    """Tell of step times and throughputs."""
    for curves in run.curves:
        tracks = [t for t in run.tracks("step_time_s", "throughput") if t.curves is curves]
        tracks = [t for t in tracks if len(t) > 2 * FEWEST and not _is_clock(t)]
        for track in tracks[:1]:
            yield from _slower(track)
            yield from _stalls(track)
    yield from _stragglers(run)


def _is_clock(track: Track) -> bool:
    """Tell whether values only ever grow: that is the time since the start."""
    return bool((track.values > 0).all() and (np.diff(track.values) >= 0).all())


def seconds_of(track: Track) -> Floats:
    """Return step times; of a throughput what is proportional to them."""
    values = track.values
    if track.role == "throughput":
        values = 1.0 / np.maximum(values, np.finfo(np.float64).tiny)
    return values


def _slower(track: Track) -> Iterator[Observation]:
    if (track.values <= 0).any():
        return
    seconds = np.log(seconds_of(track)[WARMUP:])
    rise = find_rise(seconds)
    if rise is None or np.exp(rise.size) < SLOWER:
        return
    index = WARMUP + rise.begin
    times, step = float(np.exp(rise.size)), float(track.steps[index])
    usual = float(np.median(track.values[WARMUP:index])) if rise.begin else float("nan")
    end = float(np.median(track.values[-max(5, len(track) // 20) :]))
    text = (
        f"steps take {times:.2g} times as long from step {spell_step(step)} on: "
        f"{track.series.name} goes from {spell_value(usual)} to {spell_value(end)} and stays there"
    )
    is_ramp = _grows_batch(track)
    text += "; the batch grows, too" if is_ramp else ""
    severity = Severity.WARNING if times > MUCH_SLOWER and not is_ramp else Severity.INFO
    points = (point(track, index), point(track, len(track) - 1))
    texts = (text, LOOK_SLOWER)
    severity = at_most_note(track, severity)
    yield observe(track, Kind.SLOWER, severity, texts, points, (step, None))


def _grows_batch(track: Track) -> bool:
    """Tell whether the log has a batch size or a length of sequences that grows."""
    for name, series in track.curves.series.items():
        words = name.lower().replace("_", " ").replace("-", " ")
        is_size = "batch size" in words or "seq len" in words or "sequence length" in words
        if is_size and len(series) and series.values[-1] > series.values[0]:
            return True
    return False


def _stalls(track: Track) -> Iterator[Observation]:
    if (track.values <= 0).any():
        return
    seconds = seconds_of(track)[WARMUP:]
    usual = float(np.median(seconds))
    sigma = mad_sigma(seconds)
    found = np.flatnonzero(seconds > max(STALL * usual, usual + 8.0 * sigma))
    lost = float((seconds[found] - usual).sum() / seconds.sum())
    if len(found) < FEWEST_STALLS or lost < WORTH:
        return
    gaps = np.diff(found)
    if np.abs(gaps - np.median(gaps)).max() > max(EVEN * float(np.median(gaps)), 1.0):
        return
    first = WARMUP + int(found[0])
    step = float(track.steps[first])
    every = float(np.median(np.diff(track.steps[WARMUP + found])))
    longest = float(np.median(seconds[found]) / usual)
    text = (
        f"every {spell_step(every)} steps, first at step {spell_step(step)}, a step takes "
        f"{longest:.2g} times as long as usual: {lost:.0%} of the time of the log goes there"
    )
    points = (point(track, first), point(track, WARMUP + int(found[1])))
    texts = (text, LOOK_STALLS)
    yield observe(track, Kind.STALLS, Severity.INFO, texts, points, (step, None))


def _stragglers(run: Run) -> Iterator[Observation]:
    for role in ("step_time_s", "throughput"):
        tracks = [t for t in run.tracks(role) if t.curves.rank is not None]
        for attempt in sorted({t.curves.attempt for t in tracks}):
            yield from _straggler([t for t in tracks if t.curves.attempt == attempt])


def _straggler(tracks: list[Track]) -> Iterator[Observation]:
    """Compare how long the steps of ranks take; ranks that synchronise take equally long."""
    usable = [t for t in tracks if len(t) > WARMUP and (t.values > 0).all()]
    if len(usable) < 3:
        return
    middles = np.array([float(np.median(seconds_of(t)[WARMUP // 2 :])) for t in usable])
    for index, track in enumerate(usable):
        others = np.delete(middles, index)
        times = float(middles[index] / others.max())
        if times < STRAGGLING:
            continue
        text = (
            f"rank {track.curves.rank} takes {times:.2g} times as long for a step as the slowest "
            f"of the other {len(others)} ranks ({track.series.name}: median "
            f"{spell_value(float(np.median(track.values)))})"
        )
        severity = at_most_note(track, Severity.WARNING if times > MUCH else Severity.INFO)
        step = float(track.steps[0])
        points = (point(track, len(track) // 2),)
        texts = (text, LOOK_RANK)
        yield observe(track, Kind.STRAGGLER, severity, texts, points, (step, None))
