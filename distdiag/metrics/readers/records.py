"""What readers find, put together into curves: by rank, by attempt, by name."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from distdiag.dumps.log_prefixes import NOBODY, Speaker, ranks_of_labels
from distdiag.metrics.readers.roles import roles_of, with_step_time
from distdiag.metrics.series import Curves, Series

MOST_SERIES: Final = 10_000
"""So many names are kept of one rank: names that never repeat are no series."""
_MOST_ATTEMPTS: Final = 1_000
"""A step that goes back more often counts something else than a run does."""
_MOST_SPEAKERS: Final = 4096
"""Of more writers than this it is asked, while they are read, whether they are any."""
_NUM_INTERLEAVED: Final = 4
"""So many returns of the step, each after this many steps or fewer, are several writers."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one line, row or event says.

    `step` is None where it names none; `per_epoch` is the number of steps in an epoch, where
    `step` counts within `epoch`. `time` is in seconds since 1970, 0 where it is not told.
    `is_weak`: the step counts calls of a logger; the trainer's own counts where it is told.
    """

    values: Mapping[str, float]
    step: float | None = None
    line: int = 0
    epoch: float | None = None
    per_epoch: float | None = None
    time: float = 0.0
    is_weak: bool = False


class _Points:
    """The values of one name in one attempt."""

    __slots__ = ("lines", "steps", "times", "values")

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")
        self.lines, self.times = array("q"), array("d")

    def append(self, step: float, value: float, record: Record) -> None:
        self.steps.append(step)
        self.values.append(value)
        self.lines.append(record.line)
        self.times.append(record.time)

    def extend(self, other: _Points) -> None:
        self.steps.extend(other.steps)
        self.values.extend(other.values)
        self.lines.extend(other.lines)
        self.times.extend(other.times)

    def rows(self, name: str) -> Iterator[Record]:
        for step, value, line, time in zip(
            self.steps, self.values, self.lines, self.times, strict=True
        ):
            yield Record({name: value}, step, line, time=time)

    def series(self, name: str, *, is_sorted: bool) -> Series:
        steps, times = np.array(self.steps), np.array(self.times)
        values, lines = np.array(self.values), np.array(self.lines, dtype=np.int64)
        if is_sorted:
            order = np.argsort(steps, kind="stable")
            steps, times, values, lines = (a[order] for a in (steps, times, values, lines))
        known = times if len(times) and times.all() else None
        return Series(name, steps, values, lines, known)


@dataclass(slots=True)
class _Attempt:
    points: dict[str, _Points] = field(default_factory=dict)
    has_banner: bool = False

    def steps(self) -> tuple[float, float, int]:
        """Return the first and last step, and how many different ones the longest series has."""
        longest = max(self.points.values(), key=lambda points: len(points.steps))
        return longest.steps[0], longest.steps[-1], len(set(longest.steps[:1000]))


@dataclass(slots=True)
class _Clock:
    """The last step that a rank named, in whichever of its lines."""

    step: float | None = None


class _Run:
    """The records of one speaker."""

    def __init__(self, clock: _Clock | None = None) -> None:
        self._clock = clock or _Clock()
        self.attempts = [_Attempt()]
        self.num_records = 0
        self.is_new = False
        self._has_strong = False
        self._counts: dict[str, int] = {}
        self._epoch: float | None = None
        self._raw: float | None = None
        self._offsets: dict[float, float] = {}  # by epoch: the steps before it

    def add(self, record: Record) -> None:
        """Add a record, to a new attempt if its step goes back or a banner came before."""
        named = self._named_step(record)
        step = self._clock.step if named is None else named
        current = self.attempts[-1].points
        if self.is_new or (step is not None and self._goes_back(record, step)):
            if current and len(self.attempts) < _MOST_ATTEMPTS:
                self.attempts.append(_Attempt(has_banner=self.is_new))
                self._counts.clear()
                current = self.attempts[-1].points
            self.is_new = False
        if named is not None:
            self._clock.step = named
        self.num_records += 1
        for name, value in record.values.items():
            points = current.get(name)
            if points is None:
                if len(current) >= MOST_SERIES:
                    continue
                points = current[name] = _Points()
            count = self._counts[name] = self._counts.get(name, 0) + 1
            points.append(count if step is None else step, value, record)

    def _named_step(self, record: Record) -> float | None:
        """Return the step since the beginning of the run, where the record names one."""
        step, epoch = record.step, record.epoch
        if record.is_weak and self._has_strong:
            return None
        self._has_strong |= step is not None and not record.is_weak
        if step is None:
            return epoch if self._raw is None else None
        if epoch is None:
            self._raw = step
            return step
        if record.per_epoch is not None:
            self._epoch, self._raw = epoch, step
            return epoch * record.per_epoch + step
        offset = self._offset_of(epoch, step)
        self._epoch, self._raw = epoch, step
        return offset + step

    def _offset_of(self, epoch: float, step: float) -> float:
        """Return how many steps came before this epoch, if steps are counted anew in each."""
        if self._epoch is None or self._raw is None or epoch <= self._epoch:
            return self._offsets.get(epoch, 0.0)
        offset = self._offsets.get(self._epoch, 0.0)
        if step < self._raw:
            offset += self._raw + (step == 0)
        if offset:
            self._offsets[epoch] = offset
        return offset

    def _goes_back(self, record: Record, step: float) -> bool:
        current = self.attempts[-1].points
        return any(name in current and current[name].steps[-1] > step for name in record.values)

    def names(self) -> set[str]:
        """Return the names of all series."""
        return {name for attempt in self.attempts for name in attempt.points}

    def records(self) -> Iterator[tuple[Record, int]]:
        """Yield every value, with the number of its attempt, in the order of the lines."""
        for number, attempt in enumerate(self.attempts):
            rows = (points.rows(name) for name, points in attempt.points.items())
            for record in heapq.merge(*rows, key=lambda record: record.line):
                yield record, number

    def merged(self) -> tuple[list[_Attempt], bool]:
        """Return the attempts, joined if several writers whom no line names took turns.

        Steps that go back after a step or two, while they rise on the whole, are no restarts.
        """
        attempts = [attempt for attempt in self.attempts if attempt.points]
        returns = [attempt for attempt in attempts[1:] if not attempt.has_banner]
        if len(returns) < _NUM_INTERLEAVED:
            return attempts, False
        spans = [attempt.steps() for attempt in attempts]
        lengths = sorted(number for _, _, number in spans)
        rises = spans[-1][0] > spans[0][1]
        if lengths[len(lengths) // 2] > _NUM_INTERLEAVED or not rises:
            return attempts, False
        whole = _Attempt()
        for attempt in attempts:
            for name, points in attempt.points.items():
                whole.points.setdefault(name, _Points()).extend(points)
        return [whole], True


class Collector:
    """The records of one source, until they are curves."""

    def __init__(self, source: Path) -> None:
        """Begin with nothing."""
        self.source = source
        self.formats: dict[str, int] = {}
        self._runs: dict[Speaker, _Run] = {}
        self._clocks: dict[int | None, _Clock] = {}
        self._is_anonymous = False

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return bool(self._runs)

    def add(self, format_name: str, record: Record, speaker: Speaker = NOBODY) -> None:
        """Add what a line says; a record without values adds nothing."""
        if not record.values:
            return
        self.formats[format_name] = self.formats.get(format_name, 0) + 1
        run = self._runs.get(NOBODY if self._is_anonymous else speaker)
        if run is None:
            clock = self._clocks.setdefault(speaker.rank, _Clock())
            run = self._runs[speaker] = _Run(clock)
            if len(self._runs) > _MOST_SPEAKERS and _are_counters(self._runs):
                self._runs = {NOBODY: _joined(list(self._runs.values()))}
                self._is_anonymous = True
                run = self._runs[NOBODY]
        run.add(record)

    def begin(self, speaker: Speaker = NOBODY) -> None:
        """Say that a run begins anew: what this speaker, or anybody, adds next is a new attempt."""
        for known, run in self._runs.items():
            if speaker.rank is None or speaker.rank == known.rank:
                run.is_new = True

    def curves(self, remarks: list[str]) -> Iterator[Curves]:
        """Yield the curves of each rank and attempt; `remarks` gets what is to be said of them."""
        if not self._runs:
            return
        format_name = max(self.formats, key=lambda name: self.formats[name])
        for rank, run in self._by_rank():
            attempts, is_interleaved = run.merged()
            if is_interleaved:
                remarks.append(
                    "several processes wrote in turn and no line names its rank: "
                    "their values stand side by side, in the order of the steps"
                )
            for number, attempt in enumerate(attempts):
                series = {
                    name: points.series(name, is_sorted=is_interleaved)
                    for name, points in attempt.points.items()
                }
                timed = with_step_time(series)
                yield Curves(self.source, format_name, timed, roles_of(timed), rank, number)

    def _by_rank(self) -> Iterator[tuple[int | None, _Run]]:
        """Yield the runs with the ranks that their speakers have."""
        if _are_counters(self._runs):
            yield None, _joined(list(self._runs.values()))
            return
        groups, others = _grouped(self._runs)
        if len(groups) == 1:  # the one rank that logs also writes lines without its name
            only = next(iter(groups.values()))
            for group in [group for group in others if all(_is_apart(run, only) for run in group)]:
                only.extend(group)
                others.remove(group)
        for rank, runs in sorted(groups.items()):
            yield rank, _joined(runs)
        for runs in others:
            yield None, _joined(runs)


def _grouped(runs: Mapping[Speaker, _Run]) -> tuple[dict[int, list[_Run]], list[list[_Run]]]:
    """Return the runs by rank, and groups of those whose rank nothing tells."""
    of_labels = ranks_of_labels(runs)
    has_rank = any(speaker.rank is not None for speaker in runs)
    groups: dict[int, list[_Run]] = {}
    others: list[list[_Run]] = []
    for speaker, run in runs.items():
        rank = speaker.rank
        if rank is None and not has_rank:
            rank = speaker.local_rank
        if rank is None:
            rank = of_labels.get(speaker.label)
        if rank is not None:
            groups.setdefault(rank, []).append(run)
        elif fitting := [group for group in others if _is_apart(run, group)]:
            fitting[0].append(run)
        else:
            others.append([run])
    return groups, others


def _is_apart(run: _Run, group: Iterable[_Run]) -> bool:
    """Whether a run has no series with the others: one process writes from several places."""
    names = run.names()
    return all(names.isdisjoint(other.names()) for other in group)


def _are_counters(runs: Mapping[Speaker, _Run]) -> bool:
    """Whether what stands before the lines hardly ever repeats, and so names nobody."""
    return len(runs) > 2 and 2 * len(runs) > sum(run.num_records for run in runs.values())


def _joined(runs: Sequence[_Run]) -> _Run:
    """Return the records of several runs as one, in the order of their lines."""
    if len(runs) == 1:
        return runs[0]
    whole, num_attempts = _Run(), 0
    for record, attempt in heapq.merge(
        *(run.records() for run in runs), key=lambda pair: pair[0].line
    ):
        whole.is_new |= attempt > num_attempts
        num_attempts = max(num_attempts, attempt)
        whole.add(record)
    return whole
