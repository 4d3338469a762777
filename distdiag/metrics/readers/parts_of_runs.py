"""Files of one run, put together: ranks and attempts in names, checkpoints, parts of one log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from distdiag.dumps.ranks import ranks_from_names
from distdiag.metrics.readers.mlflow import metrics_folder
from distdiag.metrics.readers.roles import roles_of
from distdiag.metrics.series import Curves, Series

_ATTEMPT: Final = re.compile(r"attempt_(\d{1,6})")
_CHECKPOINT: Final = re.compile(r"checkpoint-\d{1,12}")
_STATE: Final = "trainer-state"


def put_together(curves: Sequence[Curves]) -> tuple[Curves, ...]:
    """Return the curves with what names of files tell, and those of one run put together."""
    together: dict[tuple[str, Path], list[Curves]] = {}
    for each in curves:
        together.setdefault(_run_of(each), []).append(each)
    found: list[Curves] = []
    for (name, source), group in together.items():
        if name == "mlflow":
            found.append(_united(group, source))
        elif name == "tensorboard":
            found += _event_files(group, source)
        elif name == _STATE:
            found += _states(group)
        else:
            found += group
    return tuple(_with_names(found))


def _run_of(curves: Curves) -> tuple[str, Path]:
    """Return what the files of one run have in common."""
    source = curves.source
    if curves.format == "mlflow":
        return curves.format, metrics_folder(source)
    if curves.format == "tensorboard":
        return curves.format, source.parent
    if curves.format == _STATE:
        folder = source.parent
        return _STATE, folder.parent if _CHECKPOINT.fullmatch(folder.name) else folder
    return "", source


def _united(group: Sequence[Curves], source: Path) -> Curves:
    """Return the series of several files as one; of a name that comes twice, the first counts."""
    series: dict[str, Series] = {}
    for each in group:
        for name, values in each.series.items():
            series.setdefault(name, values)
    return replace(group[0], source=source, series=series, roles=roles_of(series))


def _event_files(group: Sequence[Curves], source: Path) -> list[Curves]:
    """Put the event files of a folder in a row: a series that comes again is a new attempt."""
    attempts: list[list[Curves]] = []
    for each in group:
        names = set(each.series)
        if attempts and all(names.isdisjoint(other.series) for other in attempts[-1]):
            attempts[-1].append(each)
        else:
            attempts.append([each])
    return [
        replace(_united(parts, source if len(parts) > 1 else parts[0].source), attempt=number)
        for number, parts in enumerate(attempts)
    ]


def _states(group: Sequence[Curves]) -> list[Curves]:
    """Drop what a later checkpoint repeats: each holds all that was logged up to its step."""
    by_length = sorted(group, key=lambda each: sum(len(s) for s in each.series.values()))
    kept = [
        each
        for place, each in enumerate(by_length)
        if not any(_is_part(each, later) for later in by_length[place + 1 :])
    ]
    return [replace(each, attempt=number) for number, each in enumerate(kept)]


def _is_part(part: Curves, whole: Curves) -> bool:
    """Whether all series of one begin those of the other."""
    for name, series in part.series.items():
        other = whole.series.get(name)
        size = len(series)
        if other is None or len(other) < size:
            return False
        if not np.array_equal(series.steps, other.steps[:size]):
            return False
        if not np.array_equal(series.values, other.values[:size], equal_nan=True):
            return False
    return True


def _with_names(curves: Iterable[Curves]) -> Iterable[Curves]:
    """Give each source its rank and its attempt, where only its name tells them."""
    every = list(curves)
    paths = dict.fromkeys(str(each.source) for each in every if each.rank is None)
    names = ranks_from_names(list(paths))
    roots = {name.root for name in names.values() if name.local_rank is not None}
    roots = {_ATTEMPT.sub("", root) for root in roots}
    for each in every:
        name = names.get(str(each.source))
        rank = each.rank
        if rank is None and name is not None and name.is_said:
            rank = name.rank
            if rank is None and len(roots) == 1:  # of one node the local ranks are the ranks
                rank = name.local_rank
        attempts = [m for p in each.source.parts if (m := _ATTEMPT.fullmatch(p)) is not None]
        attempt = each.attempt + (int(attempts[-1][1]) if attempts else 0)
        yield replace(each, rank=rank, attempt=attempt)
