"""What a run holds, in numbers: one row for each series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from distdiag.events.ranks import RankSet
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Floats

MAIN: Final = (
    *("loss", "val_loss", "grad_norm", "lr", "reward", "entropy", "kl"),
    *("loss_scale", "step_time_s", "throughput", "memory"),
)
"""The roles, the most telling first."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One series of a run over its ranks and attempts.

    `first` and `last` are the median over the ranks; `minimum` and `maximum` are of all values that
    are finite. None where no value is finite.
    """

    run: str
    series: str
    role: str
    ranks: RankSet
    num_attempts: int
    num_values: int
    num_not_finite: int
    first_step: float
    last_step: float
    first: float | None
    last: float | None
    minimum: float | None
    maximum: float | None


def rows_of(runs: Iterable[Run], names: Iterable[str] = ()) -> tuple[Row, ...]:
    """Return a row for each series, those with a role first; of `names` (or roles) alone if given.

    Without names, series that play no role are left out where others do.
    """
    wanted = set(names)
    return tuple(row for run in runs for row in _rows(run, wanted))


def _rows(run: Run, wanted: set[str]) -> Iterator[Row]:
    groups: dict[tuple[str, str], list[Track]] = {}
    for track in run.all_tracks():
        groups.setdefault((track.series.name, track.role), []).append(track)
    if wanted:
        groups = {key: value for key, value in groups.items() if wanted & set(key)}
    elif any(role for _, role in groups):
        groups = {key: value for key, value in groups.items() if key[1]}
    order = {role: place for place, role in enumerate(MAIN)}
    for key in sorted(groups, key=lambda key: (order.get(key[1], len(MAIN)), key[0])):
        yield _row(run, key, groups[key])


def _row(run: Run, key: tuple[str, str], tracks: list[Track]) -> Row:
    values = np.concatenate([track.values for track in tracks])
    steps = np.concatenate([track.series.steps for track in tracks])
    steps = steps[np.isfinite(steps)]
    attempts = sorted({track.curves.attempt for track in tracks})
    begin = [t.values for t in tracks if t.curves.attempt == attempts[0] and len(t)]
    end = [t.values for t in tracks if t.curves.attempt == attempts[-1] and len(t)]
    number = sum(len(track.series) for track in tracks)
    return Row(
        run=run.name,
        series=key[0],
        role=key[1],
        ranks=RankSet(rank for track in tracks for rank in track.ranks),
        num_attempts=len(attempts),
        num_values=number,
        num_not_finite=number - len(values),
        first_step=float(steps.min(initial=np.inf)) if steps.size else 0.0,
        last_step=float(steps.max(initial=-np.inf)) if steps.size else 0.0,
        first=float(np.median([each[0] for each in begin])) if begin else None,
        last=float(np.median([each[-1] for each in end])) if end else None,
        minimum=float(values.min()) if values.size else None,
        maximum=float(values.max()) if values.size else None,
    )


def main_track(run: Run, names: Iterable[str]) -> Track | None:
    """Return the series that tells most of a run: by its role, of the rank that has most of it."""
    shown = set(names)
    order = {role: place for place, role in enumerate(MAIN)}

    def telling(track: Track) -> tuple[int, int, int]:
        place = order.get(track.role, len(MAIN))
        return -place, len(track.series), -(track.curves.rank or 0)

    tracks = (track for track in run.all_tracks() if track.series.name in shown)
    return max(tracks, key=telling, default=None)


def sparkline(values: Floats, width: int, marks: str = "▁▂▃▄▅▆▇█") -> str:
    """Return values as a line of `width` characters; ``x`` where one of its share is not finite.

    Each character stands for the median of its share of the values.
    """
    if not len(values) or width < 1:
        return ""
    parts = np.array_split(values, min(width, len(values)))
    finite = [part[np.isfinite(part)] for part in parts]
    middles = np.array([np.median(part) if part.size else np.nan for part in finite])
    if not np.isfinite(middles).any():
        return "x" * len(parts)
    low, high = float(np.nanmin(middles)), float(np.nanmax(middles))
    scale = (len(marks) - 1) / (high - low) if high > low and np.isfinite(high - low) else 0.0
    line = []
    for part, kept, middle in zip(parts, finite, middles, strict=True):
        is_whole = len(part) == len(kept)
        line.append(marks[round((float(middle) - low) * scale)] if is_whole else "x")
    return "".join(line)
