"""What modules return in two runs, sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from distdiag.disparity import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.recorded_run import UNIT, Array, RecordedRun
from distdiag.parity.tolerance import Common, Exactness, judge, measure
from distdiag.ranks import RankSet
from distdiag.recording import Kind

_GUILTY: Final = 0.3
Figures = tuple[object, Array]
"""Of how many elements, and the figures of all samples."""


def output_pairs(
    reference: RecordedRun, repeats: Sequence[RecordedRun], candidate: RecordedRun, step: int
) -> Iterator[Pair]:
    """Yield what each module returned in a step, in the order in which they returned."""
    exactness = Exactness(UNIT["float32"], computed=reference.compute_unit, num_steps=step)
    for micro in range(reference.num_micro(step)):
        for name in reference.names(Kind.OUTPUT, step, micro):
            runs = (reference, candidate, *repeats)
            figures = [_figures(run, step, micro, name) for run in runs]
            if figures[0] and figures[1] and figures[0][0] != figures[1][0]:
                figures[1] = _joined(candidate, step, micro, name)
                figures = [_without_order(each) for each in figures]
            known = [each for each in figures if each is not None]
            # What still has fewer elements is a part whose other parts are not known.
            if len(known) < len(runs) or len({(size, each.shape) for size, each in known}) > 1:
                continue
            # Relative to the size of each sample's values, not to a mean that may be near zero.
            sizes = known[0][1][:, 1:2] + 1e-30
            scaled = [each / sizes + 1 for _, each in known]
            found = _worst(name, scaled, len(candidate.coordinates), exactness)
            if found is not None:
                yield Pair(found, scaled[0], scaled[1])


def _worst(
    name: str, figures: Sequence[Array], num_coordinates: int, exactness: Exactness
) -> Difference | None:
    """Compare the samples of each data coordinate: few wrong ones must not drown in the others."""
    whole = measure(name, figures[0], figures[1], figures[2:], exactness)
    if whole is None:
        return None
    found = [judge(whole, Common(), sees_factor=False)]
    if len(figures[0]) % num_coordinates == 0:
        for parts in zip(*(np.split(each, num_coordinates) for each in figures), strict=True):
            part = measure(name, parts[0], parts[1], parts[2:], exactness)
            if part is not None:
                part = part._replace(noise=max(part.noise, whole.noise))
                found.append(judge(part, Common(), sees_factor=False))
    return max(found, key=lambda each: each.ratio)


def _figures(run: RecordedRun, step: int, micro: int, name: str) -> Figures | None:
    """Return the figures of all samples, and of how many elements they were computed."""
    records = run.by_rank(Kind.OUTPUT, step, micro, name)
    ranks = [coordinate[0] for coordinate in run.coordinates]
    if not ranks or any(rank not in records for rank in ranks):
        return None
    if len({records[rank].values for rank in ranks}) > 1:
        return None
    rows = np.concatenate([run.array(rank, records[rank]) for rank in ranks])
    return records[ranks[0]].values, rows


def _joined(run: RecordedRun, step: int, micro: int, name: str) -> Figures | None:
    """Return the figures of outputs of which each rank of a coordinate has an own part."""
    records = run.by_rank(Kind.OUTPUT, step, micro, name)
    sizes: set[float] = set()
    rows: list[Array] = []
    for ranks in run.coordinates:
        own = [records[rank] for rank in ranks if rank in records]
        if len(own) < max(len(ranks), 2) or len({record.shape for record in own}) > 1:
            return None
        parts = np.array([float(record.values[0]) for record in own if record.values])  # type: ignore[arg-type]
        figures = [run.array(rank, records[rank]) for rank in ranks]
        shares = parts / parts.sum()
        mean = sum(share * each[:, 0] for share, each in zip(shares, figures, strict=True))
        square = sum(share * each[:, 1] ** 2 for share, each in zip(shares, figures, strict=True))
        rows.append(np.stack((mean, np.sqrt(square)), 1))
        sizes.add(float(parts.sum()))
    return ((int(sizes.pop()),), np.concatenate(rows)) if len(sizes) == 1 else None


def _without_order(figures: Figures | None) -> Figures | None:
    """Leave out the figure that depends on the order of the elements."""
    return None if figures is None else (figures[0], figures[1][:, :2])


def differing_ranks(pair: Pair, coordinates: Sequence[Sequence[int]]) -> RankSet:
    """Return the ranks whose samples differ, if those of others do not."""
    rows = np.linalg.norm(pair.candidate - pair.reference, axis=1)
    if not len(rows) or len(rows) % len(coordinates):
        return RankSet()
    worst = [float(part.max()) for part in np.split(rows, len(coordinates))]
    guilty = [n for n, size in enumerate(worst) if size > _GUILTY * max(worst)]
    if len(guilty) == len(coordinates):
        return RankSet()
    return RankSet(rank for number in guilty for rank in coordinates[number])
