"""What modules return in two runs, sample by sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np

from distdiag.disparity import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.recorded_run import UNIT, Array, RecordedRun
from distdiag.parity.tolerance import Common, Exactness, judge, measure
from distdiag.ranks import RankSet
from distdiag.recording import Kind

_GUILTY: Final = 0.3


def output_pairs(
    reference: RecordedRun,
    repeats: Sequence[RecordedRun],
    candidate: RecordedRun,
    step: int,
    experts: Collection[str] = (),
) -> Iterator[Pair]:
    """Yield what each module returned in a step, in the order in which they returned.

    What `experts` returned is left out: their rows are not those of the rank's own samples.
    """
    if reference.num_micro(step) != candidate.num_micro(step):
        return  # their passes have other samples
    exactness = Exactness(UNIT["float32"], computed=reference.compute_unit, num_steps=step)
    for micro in range(reference.num_micro(step)):
        for name in reference.names(Kind.OUTPUT, step, micro):
            if any(f"{name.rpartition('#')[0]}.".startswith(f"{each}.") for each in experts):
                continue
            runs = (reference, candidate, *repeats)
            figures = [_figures(run, step, micro, name) for run in runs]
            known = [each for each in figures if each is not None]
            # What has fewer elements is this rank's part of the output, which is not compared; and
            # what has its samples on another axis has some other dimension of that size.
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


def _figures(run: RecordedRun, step: int, micro: int, name: str) -> tuple[object, Array] | None:
    """Return the figures of all samples, and of how many elements on which axis they were found."""
    records = run.by_rank(Kind.OUTPUT, step, micro, name)
    ranks = [coordinate[0] for coordinate in run.coordinates]
    if not ranks or any(rank not in records for rank in ranks):
        return None
    if len({records[rank].values for rank in ranks}) > 1:
        return None
    rows = np.concatenate([run.array(rank, records[rank]) for rank in ranks])
    return records[ranks[0]].values, rows


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
