"""Puts a recorded run and its reference side by side, and finds what differs first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from distdiag.disparity import Difference, Disparity, Subject
from distdiag.parity.batches import differing_data, shared_samples
from distdiag.parity.explanations import Pair, Weights, explain, weights_of
from distdiag.parity.loose_parts import compare_parts
from distdiag.parity.recorded_run import Array, Recorded, RecordedRun
from distdiag.parity.room import num_cores
from distdiag.parity.tolerance import compare, distances
from distdiag.ranks import RankSet
from distdiag.recording import Kind

SHOWN: Final = 8
MOST_EXPLAINED: Final = 24
MOST_ELEMENTS: Final = 4_000_000
MOST_THREADS: Final = 8

_EMPTY: Final = np.empty(0)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of the comparison: the losses, and the worst ratio to the bound of each kind."""

    step: int
    reference_loss: float
    candidate_loss: float
    ratios: dict[Subject, float]


@dataclass(slots=True)
class Result:
    """What a comparison found: at most one disparity, since the rest would follow from it."""

    disparity: Disparity | None = None
    rows: list[StepRow] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    drawn_anew: list[str] = field(default_factory=list)
    """Parameters that each rank draws its part of, so that no two runs train the same model."""


class Absent(Enum):
    """Why there is no figure of a tensor."""

    PARTS = auto()  # one of the runs has not recorded all of it
    MEANING = auto()  # rounding alone changes it too much


class Comparison:
    """Compares one run with its reference."""

    def __init__(
        self,
        reference: RecordedRun,
        repeats: Sequence[RecordedRun],
        candidate: RecordedRun,
        *,
        is_replayed: bool,
    ) -> None:
        """Compare `candidate` with `reference`, as far apart as its `repeats` allow.

        `is_replayed`: both got the same batches in the same order.
        """
        self._reference = reference
        self._repeats = repeats
        self._candidate = candidate
        self._is_replayed = is_replayed
        self._result = Result()

    def run(self) -> Result:
        """Go through the steps until something differs."""
        result = self._result
        result.disparity = self._data() or self._start()
        if result.disparity is not None or result.drawn_anew:
            return result
        num_steps = min(run.num_steps for run in (self._reference, self._candidate, *self._repeats))
        for step in range(num_steps):
            row = StepRow(step, *self._losses(step), {})
            result.rows.append(row)
            result.disparity = self._step(step, row)
            if result.disparity is not None:
                break
        return result

    def _step(self, step: int, row: StepRow) -> Disparity | None:
        stages = (
            (Subject.OUTPUT, self._outputs(step) if self._is_replayed else iter(())),
            (Subject.LOSS, self._loss(step)),
            (Subject.GRADIENT, self._tensors(Subject.GRADIENT, step)),
            (Subject.UPDATE, self._tensors(Subject.UPDATE, step)),
        )
        for subject, found in stages:
            pairs = list(found)
            row.ratios[subject] = max((pair.difference.ratio for pair in pairs), default=0.0)
            differing = [pair for pair in pairs if pair.difference.ratio > 1]
            if differing:
                self._result.pairs = differing
                return self._disparity(subject, step, differing, len(pairs))
        return None

    def _disparity(
        self, subject: Subject, step: int, pairs: Sequence[Pair], num_compared: int
    ) -> Disparity:
        first = pairs[0]
        culprits, details = RankSet(), []
        if subject is Subject.OUTPUT:
            culprits = self._output_ranks(first)
            explanation = ""
        else:
            explanation = explain(pairs[:MOST_EXPLAINED], self.sizes(step))
        if subject is Subject.UPDATE:
            details += self._rates(step)
        if subject is Subject.GRADIENT:
            details += self._unlike_replicas(step)
        return Disparity(
            rank=0,
            seq=0,
            time_ns=0,
            step=step,
            subject=subject,
            candidate=self._candidate.label,
            reference=self._reference.label,
            differences=tuple(pair.difference for pair in pairs[:SHOWN]),
            num_compared=num_compared,
            explanation=explanation,
            culprits=culprits,
            details=tuple(details),
        )

    def sizes(self, step: int) -> dict[str, int]:
        """Return the numbers that may stand behind a factor."""
        summaries = self._candidate.summaries.values()
        sizes = {"the number of ranks": len(self._candidate.summaries)}
        sizes["the number of data coordinates"] = len(self._candidate.coordinates)
        for summary in summaries:
            sizes.update({f"the size of mesh axis {k}": n for k, n in summary.mesh_sizes.items()})
        micro = self._candidate.num_micro(step)
        sizes["the number of accumulation steps"] = micro
        sizes["accumulation steps and ranks together"] = micro * len(self._candidate.summaries)
        return {name: size for name, size in sizes.items() if size > 1}

    # Data and the beginning

    def _data(self) -> Disparity | None:
        if self._is_replayed:
            text, ranks = shared_samples(self._candidate)
        else:
            text, ranks = differing_data(self._reference, self._candidate), RankSet()
        return self._of_all(Subject.DATA, text, ranks) if text else None

    def _of_all(self, subject: Subject, text: str, ranks: RankSet) -> Disparity:
        return Disparity(
            rank=0,
            seq=0,
            time_ns=0,
            step=0,
            subject=subject,
            candidate=self._candidate.label,
            reference=self._reference.label,
            differences=(),
            num_compared=0,
            explanation=text,
            culprits=ranks,
        )

    def _start(self) -> Disparity | None:
        differing, names = [], self._reference.names(Kind.START, 0)
        for name in names:
            ours = self._reference.as_recorded(Kind.START, 0, name)
            theirs = self._candidate.as_recorded(Kind.START, 0, name)
            if ours is None or theirs is None or ours.shape != theirs.shape:
                loose = self._loose_parts(name)
                differing += [_kept(loose, _EMPTY, _EMPTY)] if loose is not None else []
            elif not np.array_equal(ours, theirs, equal_nan=True):
                unit = self._reference.unit(Kind.START, 0, name)
                found = compare(name, ours, theirs, (), unit)
                if found is not None and found.ratio > 1:
                    differing.append(_kept(found, ours, theirs))
        if not differing:
            return None
        return self._disparity(Subject.START, 0, differing, len(names))

    def _loose_parts(self, name: str) -> Difference | None:
        """Return in which scale a parameter begins whose parts no mesh puts together."""
        parts = compare_parts(self._reference, self._candidate, name)
        if parts is None or parts.are_same:
            self._result.not_compared[name] = self._why_not(name)
        elif parts.difference is None:
            self._result.drawn_anew.append(name)
            self._result.not_compared[name] = "its parts begin with other values, as large as these"
        return None if parts is None else parts.difference

    def _why_not(self, name: str) -> str:
        for summary in self._candidate.summaries.values():
            if name in summary.unreadable:
                return summary.unreadable[name]
        theirs = self._candidate.by_rank(Kind.START, 0, 0, name)
        if not theirs:
            return f"no parameter of {self._candidate.label} has this name"
        shapes = {str(tuple(record.shape)) for record in theirs.values()}
        return f"its parts have the shapes {', '.join(sorted(shapes))}, and no mesh tells the whole"

    # One step

    def _losses(self, step: int) -> tuple[float, float]:
        micros = range(self._reference.num_micro(step))
        ours = [self._loss_of(self._reference, step, micro) for micro in micros]
        theirs = [self._loss_of(self._candidate, step, micro) for micro in micros]
        total = [sum(float(each.mean()) for each in run if each.size) for run in (ours, theirs)]
        return total[0], total[1]

    def _loss_of(self, run: RecordedRun, step: int, micro: int) -> Array:
        """Return the losses of all data coordinates in one pass."""
        records = run.by_rank(Kind.LOSS, step, micro, "loss")
        ranks = [coordinate[0] for coordinate in run.coordinates]
        values = [records[rank].values for rank in ranks if rank in records]
        return np.array([value[0] for value in values if value], dtype=np.float64)

    def _loss(self, step: int) -> Iterator[Pair]:
        unit = self._reference.unit(Kind.LOSS, step, "loss")
        for micro in range(self._reference.num_micro(step)):
            ours = self._loss_of(self._reference, step, micro)
            theirs = self._loss_of(self._candidate, step, micro)
            repeats = [self._loss_of(run, step, micro) for run in self._repeats]
            if not ours.size or not theirs.size or any(not each.size for each in repeats):
                continue
            means = [np.array([each.mean()]) for each in repeats]
            candidates = [np.array([theirs.mean()]), np.array([theirs.sum()])]
            reference = np.array([ours.mean()])
            name = f"loss of pass {micro + 1}"
            found = [
                Pair(difference, reference, candidate)
                for candidate in candidates
                if (difference := compare(name, reference, candidate, means, 2 * unit)) is not None
            ]
            # Whether losses are averaged or summed over ranks, the gradients will show.
            if found:
                yield min(found, key=lambda pair: pair.difference.ratio)

    def _tensors(self, subject: Subject, step: int) -> Iterator[Pair]:
        kind = Kind.GRADIENT if subject is Subject.GRADIENT else Kind.PARAMETER
        names = self._reference.names(kind, step)
        if kind is Kind.GRADIENT:
            names.reverse()
        with ThreadPoolExecutor(min(len(names), num_cores(), MOST_THREADS) or 1) as pool:
            pairs = pool.map(lambda name: self._one_tensor(kind, step, name), names)
            for name, pair in zip(names, pairs, strict=True):
                if isinstance(pair, Pair):
                    yield pair
                elif pair is Absent.PARTS and kind is Kind.GRADIENT:
                    self._result.not_compared.setdefault(
                        name, f"its gradient was not recorded wholly in {self._candidate.label}"
                    )

    def _one_tensor(self, kind: Kind, step: int, name: str) -> Pair | Absent:
        """Compare one tensor, or say why it is not compared."""
        reference = self._tensor(self._reference, kind, step, name)
        candidate = self._tensor(self._candidate, kind, step, name)
        if reference is None or candidate is None or reference.shape != candidate.shape:
            return Absent.PARTS
        others = [run for run in self._repeats if not self._is_same(run, kind, step, name)]
        repeats = [self._tensor(run, kind, step, name) for run in others]
        known = [each for each in repeats if each is not None]
        unit = self._reference.unit(kind, step, name)
        if kind is Kind.PARAMETER:
            unit *= self._rounding_of_changes(step, name, reference)
        found = compare(name, reference, candidate, known, unit)
        return Absent.MEANING if found is None else _kept(found, reference, candidate)

    def _is_same(self, run: RecordedRun, kind: Kind, step: int, name: str) -> bool:
        """Tell whether a repeat is the reference to the last bit, without reading it."""
        places = [(kind, step)]
        if kind is Kind.PARAMETER:
            places.append((Kind.PARAMETER, step - 1) if step else (Kind.START, 0))
        digests = [(self._reference.digest(*at, name), run.digest(*at, name)) for at in places]
        return all(ours and ours == theirs for ours, theirs in digests)

    def _rounding_of_changes(self, step: int, name: str, change: Recorded) -> float:
        """Return how many units of a change one unit of the parameter itself is."""
        whole = self._reference.as_recorded(Kind.PARAMETER, step, name)
        size, _ = distances(change, ())
        return 1.0 if whole is None or not size else 1 + distances(whole, ())[0] / size

    def _tensor(self, run: RecordedRun, kind: Kind, step: int, name: str) -> Recorded | None:
        whole = run.as_recorded(kind, step, name)
        if whole is None or kind is Kind.GRADIENT:
            return whole
        place = (Kind.PARAMETER, step - 1) if step else (Kind.START, 0)
        before = run.as_recorded(*place, name)
        return None if before is None else whole - before

    def _outputs(self, step: int) -> Iterator[Pair]:
        for micro in range(self._reference.num_micro(step)):
            for name in self._reference.names(Kind.OUTPUT, step, micro):
                runs = (self._reference, self._candidate, *self._repeats)
                figures = [self._figures(run, step, micro, name) for run in runs]
                known = [each for each in figures if each is not None]
                if len(known) < len(runs) or len({each.shape for each in known}) > 1:
                    continue
                # Relative to the size of each sample's values, not to a mean that may be near zero.
                sizes = known[0][:, 1:2] + 1e-30
                scaled = [each / sizes + 1 for each in known]
                found = compare(name, scaled[0], scaled[1], scaled[2:], 2.0**-23)
                if found is not None:
                    yield Pair(found, scaled[0], scaled[1])

    def _figures(self, run: RecordedRun, step: int, micro: int, name: str) -> Array | None:
        records = run.by_rank(Kind.OUTPUT, step, micro, name)
        ranks = [coordinate[0] for coordinate in run.coordinates]
        if any(rank not in records for rank in ranks):
            return None
        if len({records[rank].values for rank in ranks}) > 1:
            return None
        return np.concatenate([run.array(rank, records[rank]) for rank in ranks])

    def _output_ranks(self, pair: Pair) -> RankSet:
        """Return the ranks whose samples differ, if those of others do not."""
        rows = np.linalg.norm(pair.candidate - pair.reference, axis=1)
        coordinates = self._candidate.coordinates
        if not len(rows) or len(rows) % len(coordinates):
            return RankSet()
        parts = np.split(rows, len(coordinates))
        worst = [float(part.max()) for part in parts]
        guilty = [n for n, size in enumerate(worst) if size > 0.3 * max(worst)]
        if len(guilty) == len(coordinates):
            return RankSet()
        return RankSet(rank for number in guilty for rank in coordinates[number])

    # Details

    def _rates(self, step: int) -> list[str]:
        found = []
        ours = self._reference.by_rank(Kind.RATE, step, 0, "rates")
        for rank, record in self._candidate.by_rank(Kind.RATE, step, 0, "rates").items():
            due = next(iter(ours.values())).values if ours else None
            if due is not None and record.values != due:
                found.append(f"rank {rank} has the learning rates {record.values}, not {due}")
        return found

    def _unlike_replicas(self, step: int) -> list[str]:
        found = self._candidate.differing_replicas(Kind.GRADIENT, step)
        return [
            f"the ranks hold unlike gradients of {name}: {' | '.join(map(str, camps.values()))}"
            for name, camps in list(found.items())[:SHOWN]
        ]

    def gradient_pairs(self, step: int) -> list[Pair]:
        """Return the gradients of a step that are no larger than can be explained."""
        found, room = [], MOST_ELEMENTS
        for name in self._reference.names(Kind.GRADIENT, step):
            ours = self._reference.whole(Kind.GRADIENT, step, name)
            theirs = self._candidate.whole(Kind.GRADIENT, step, name)
            if ours is None or theirs is None or ours.shape != theirs.shape or ours.size > room:
                continue
            room -= ours.size
            none = Difference(name=name, measured=0.0, bound=0.0, ratio=0.0)
            found.append(Pair(none, ours, theirs))
        return found

    def weights(self, pairs: Sequence[Pair], alone: Sequence[RecordedRun]) -> Weights | None:
        """Find the weights of the coordinates' data, from runs on the data of each alone."""
        kept, parts = [], [[] for _ in alone]  # type: ignore[var-annotated]
        for pair in pairs:
            name = pair.difference.name
            arrays = [run.whole(Kind.GRADIENT, 0, name) for run in alone]
            if pair.reference.size and all(array is not None for array in arrays):
                kept.append(pair)
                for part, array in zip(parts, arrays, strict=True):
                    part.append(array)
        return weights_of(kept, parts) if kept else None


def _kept(found: Difference, reference: Recorded, candidate: Recorded) -> Pair:
    """Keep the values with what was measured if they may have to be explained."""
    if found.ratio > 1 and reference.size <= MOST_ELEMENTS:
        return Pair(found, reference.astype(np.float64), candidate.astype(np.float64))
    return Pair(found, _EMPTY, _EMPTY)
