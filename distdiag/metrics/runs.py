"""Sources put together into runs: which ranks and attempts are one run, and one series of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from distdiag.events.ranks import RankSet
from distdiag.metrics.series import Curves, Floats, Series

MOST_OF_RUN_REPEATED: Final = 0.5
"""A file that repeats more than this share of the steps of the one before is a run of its own, and
no restart: a checkpoint is rarely older than half of a run."""


@dataclass(frozen=True)
class Track:
    """One series of one rank in one attempt: the finite values, in the order of their steps.

    `kept` are the places of these values in the series.
    """

    run: str
    curves: Curves
    series: Series
    role: str = ""

    @cached_property
    def kept(self) -> npt.NDArray[np.intp]:
        """The places of the finite values, in the order of their steps."""
        usable = np.flatnonzero(np.isfinite(self.series.values) & np.isfinite(self.series.steps))
        return usable[np.argsort(self.series.steps[usable], kind="stable")]

    @cached_property
    def values(self) -> Floats:
        """The finite values."""
        return self.series.values[self.kept]

    @cached_property
    def steps(self) -> Floats:
        """The steps of the finite values."""
        return self.series.steps[self.kept]

    @property
    def ranks(self) -> RankSet:
        """The rank, as a set; empty where the log names none."""
        return RankSet(() if self.curves.rank is None else (self.curves.rank,))

    def __len__(self) -> int:
        return len(self.kept)


@dataclass(frozen=True)
class Run:
    """The curves of one run, by attempt and rank."""

    name: str
    curves: tuple[Curves, ...]

    def tracks(self, *roles: str) -> Iterator[Track]:
        """Yield the series that play these roles, of each rank and attempt."""
        for curves in self.curves:
            for role in roles:
                if (series := curves.of(role)) is not None and len(series):
                    yield Track(self.name, curves, series, role)

    def all_tracks(self) -> Iterator[Track]:
        """Yield all series of each rank and attempt."""
        for curves in self.curves:
            roles = {name: role for role, name in curves.roles.items()}
            for name, series in curves.series.items():
                if len(series):
                    yield Track(self.name, curves, series, roles.get(name, ""))

    def by_rank(self) -> dict[int | None, list[Curves]]:
        """Return the attempts of each rank, in their order."""
        found: dict[int | None, list[Curves]] = {}
        for curves in self.curves:
            found.setdefault(curves.rank, []).append(curves)
        return found


def beside(track: Track, role: str) -> Track | None:
    """Return another series of the same rank and attempt, None if there is none."""
    series = track.curves.of(role)
    if series is None or not len(series):
        return None
    return Track(track.run, track.curves, series, role)


def runs_of(curves: Iterable[Curves]) -> tuple[Run, ...]:
    """Put curves together into runs.

    One file is one run. Files of one folder and one format are one run, too, if each names ranks
    that no other names (they are its ranks), or if each goes on where the one before ends (they are
    its attempts). All others are runs of their own.
    """
    by_source: dict[Path, list[Curves]] = {}
    for each in curves:
        by_source.setdefault(each.source, []).append(each)
    groups: list[list[list[Curves]]] = []
    for source in by_source.values():
        for group in groups:
            if _is_rank_of(group, source) or _goes_on(group, source):
                group.append(source)
                break
        else:
            groups.append([source])
    names = _names([[each for source in group for each in source] for group in groups])
    return tuple(Run(name, _in_order(group)) for name, group in zip(names, groups, strict=True))


def _is_alike(group: list[list[Curves]], source: list[Curves]) -> bool:
    """Tell whether two files may be of one run: one format, and folders that say nothing else."""
    one, other = group[0][0], source[0]
    here, there = one.source, other.source
    is_near = here.parent == there.parent or (
        # torchrun writes attempt_0/0/stdout.log, attempt_0/1/stdout.log, attempt_1/0/stdout.log.
        here.name == there.name and here.parent.parent.parent == there.parent.parent.parent
    )
    return one.format == other.format and is_near


def _is_rank_of(group: list[list[Curves]], source: list[Curves]) -> bool:
    """Tell whether a file holds ranks, or attempts of them, that no file of the group holds."""
    known = {(each.rank, each.attempt) for one in group for each in one}
    more = {(each.rank, each.attempt) for each in source}
    are_named = all(rank is not None for rank, _ in known | more)
    return _is_alike(group, source) and are_named and not known & more


def _goes_on(group: list[list[Curves]], source: list[Curves]) -> bool:
    """Tell whether a file begins within the steps of the last file of the group, and ends later."""
    last = group[-1]
    if not _is_alike(group, source) or {c.rank for c in last} != {c.rank for c in source}:
        return False
    if not {name for c in last for name in c.series} & {name for c in source for name in c.series}:
        return False
    (begin, end), (next_begin, next_end) = _span(last), _span(source)
    allowed = end - MOST_OF_RUN_REPEATED * (end - begin)
    # A gap as long as the part before is no restart either: it is another run.
    return begin < allowed < next_begin <= end + (end - begin) and next_end > end


def _span(source: list[Curves]) -> tuple[float, float]:
    steps = [s.steps[np.isfinite(s.steps)] for c in source for s in c.series.values()]
    every = np.concatenate([*steps, np.empty(0)])
    return (float(every.min()), float(every.max())) if every.size else (0.0, 0.0)


def _in_order(group: list[list[Curves]]) -> tuple[Curves, ...]:
    """Return the curves of a group; files that follow one another are counted as attempts."""
    found: list[Curves] = []
    seen: set[tuple[int | None, int]] = set()
    for source in group:
        taken = [attempt for rank, attempt in seen if rank == source[0].rank]
        repeats = any((each.rank, each.attempt) in seen for each in source)
        later = max(taken, default=-1) + 1 if repeats else 0
        found += [replace(each, attempt=later + each.attempt) for each in source]
        seen.update((each.rank, later + each.attempt) for each in source)
    return tuple(sorted(found, key=lambda c: (c.attempt, -1 if c.rank is None else c.rank)))


def _names(groups: list[list[Curves]]) -> list[str]:
    """Return a short name for each run: the file, or the folder of several, longer where alike."""
    paths = [g[0].source if len({c.source for c in g}) == 1 else g[0].source.parent for g in groups]
    for depth in range(1, 6):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
