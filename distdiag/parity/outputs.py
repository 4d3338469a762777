"""What modules return in two runs, sample by sample."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.events.ranks import RankSet
from distdiag.parity.explanations import Pair
from distdiag.parity.rank_files import UNIT, Array
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.tolerance import Common, Exactness, difference_of, measure
from distdiag.record.recording import Kind, Record

_UNKNOWN: Final = -1
"""The axis of samples that stand one behind the other."""
_GUILTY: Final = 0.3
_ALIKE: Final = 1e-3
_ROUNDED: Final = 1e-3
"""Of what other places do to a mean with weights, rounding in another order does far less."""
Figures = tuple[object, Array]
"""Of how many elements, on which axis the samples were found, and the figures of them all."""


def output_pairs(
    reference: RecordedRun,
    repeats: Sequence[RecordedRun],
    candidate: RecordedRun,
    step: int,
    experts: Collection[str] = (),
    kind: Kind = Kind.OUTPUT,
) -> Iterator[Pair]:
    """Yield what each module, or function, returned in a step, in the order in which they returned.

    What `experts` returned is left out: their rows are not those of the rank's own samples.
    """
    if reference.num_micro(step) != candidate.num_micro(step):
        return  # their passes have other samples
    exactness = Exactness(UNIT["float32"], computed=reference.compute_unit, num_steps=step)
    for micro in range(reference.num_micro(step)):
        for name in reference.names(kind, step, micro):
            if any(f"{name.rpartition('#')[0]}.".startswith(f"{each}.") for each in experts):
                continue
            runs = (reference, candidate, *repeats)
            found = _compared(runs, Place(kind, step, micro, name), exactness)
            if found is not None:
                yield found


class Place(NamedTuple):
    """What returned something, and when."""

    kind: Kind
    step: int
    micro: int
    name: str

    def records(self, run: RecordedRun) -> Mapping[int, Record]:
        """Return what the ranks of a run have recorded there."""
        return run.by_rank(self.kind, self.step, self.micro, self.name)


def _compared(runs: Sequence[RecordedRun], place: Place, exactness: Exactness) -> Pair | None:
    """Compare what one module returned in the reference, the candidate and the repeats."""
    candidate, name = runs[1], place.name
    known = [each for run in runs if (each := _figures(run, place)) is not None]
    if len(known) < len(runs):
        return None
    noise = 0.0
    if known[0][0] != known[1][0]:
        joined = _joined(candidate, place)
        if joined is None:
            return None  # a part whose other parts are not known
        noise = _noise(name, known, exactness)
        known = [_pooled(each) for each in (known[0], joined, *known[2:])]
    elif not _is_shared(candidate, place):
        return None
    # What has its samples on another axis has some other dimension of that size.
    if len({(size, each.shape) for size, each in known}) > 1:
        return None
    scaled = _scaled(known)
    num = len(candidate.coordinates)
    found = _worst(name, scaled, num, exactness, noise)
    if found is not None and found.ratio > 1:
        others = _in_any_order(name, known, num, exactness, noise)
        found = next((each for each in others if each.ratio <= 1), found)
    return None if found is None else Pair(found, scaled[0], scaled[1])


def _in_any_order(
    name: str,
    figures: Sequence[Figures],
    num_coordinates: int,
    exactness: Exactness,
    noise: float,
) -> Iterator[Difference]:
    """Compare the samples as a set: a program may put those of its batch into another order.

    They are sorted by one figure after the other, since rounding may swap neighbours in one of
    them. Rows that stand one behind the other belong to samples that are not known: of them only
    what they are on the whole is compared.
    """
    size, rows = figures[0]
    orders = [
        [(size, each[np.argsort(each[:, column])]) for size, each in figures]
        for column in range(rows.shape[1])
    ]
    if isinstance(size, tuple) and size[-1] == _UNKNOWN:
        orders.append([_pooled(each) for each in figures])
    for order in orders:
        found = _worst(name, _scaled(order), num_coordinates, exactness, noise)
        if found is not None:
            yield found


def _scaled(figures: Sequence[Figures]) -> list[Array]:
    """Return figures relative to the size of each sample's values, not to a mean near zero."""
    sizes = figures[0][1][:, 1:2] + 1e-30
    return [each / sizes + 1 for _, each in figures]


def _noise(name: str, figures: Sequence[Figures], exactness: Exactness) -> float:
    """Return what rounding does to single samples: of all together a repeat says too little."""
    reference, *repeats = _scaled([figures[0], *figures[2:]])
    found = measure(name, reference, reference, repeats, exactness)
    return 0.0 if found is None else found.noise


def _worst(
    name: str,
    figures: Sequence[Array],
    num_coordinates: int,
    exactness: Exactness,
    noise: float,
) -> Difference | None:
    """Compare the samples of each data coordinate: few wrong ones must not drown in the others."""
    whole = measure(name, figures[0], figures[1], figures[2:], exactness)
    if whole is None:
        return None
    whole = whole._replace(noise=max(whole.noise, noise))
    found = [difference_of(whole, Common(), sees_factor=False)]
    if len(figures[0]) % num_coordinates == 0:
        for parts in zip(*(np.split(each, num_coordinates) for each in figures), strict=True):
            part = measure(name, parts[0], parts[1], parts[2:], exactness)
            if part is not None:
                part = part._replace(noise=max(part.noise, whole.noise))
                found.append(difference_of(part, Common(), sees_factor=False))
    return max(found, key=lambda each: each.ratio)


def _figures(run: RecordedRun, place: Place) -> Figures | None:
    """Return the figures of all samples, and of how many elements on which axis they were found."""
    records = place.records(run)
    ranks = [coordinate[0] for coordinate in run.coordinates]
    if not ranks or any(rank not in records for rank in ranks):
        return None
    if len({records[rank].values for rank in ranks}) > 1:
        return None
    rows = np.concatenate([run.array(rank, records[rank]) for rank in ranks])
    return records[ranks[0]].values, rows


def _is_shared(run: RecordedRun, place: Place) -> bool:
    """Say whether all ranks that share their samples return the same.

    If not, each has a part of a sequence, or of a sum that is reduced later.
    """
    records = place.records(run)
    for ranks in run.coordinates:
        own = [run.array(rank, records[rank]) for rank in ranks if rank in records]
        if len({each.shape for each in own}) > 1:
            return False
        if not all(np.allclose(each, own[0], rtol=_ALIKE) for each in own):
            return False
    return True


def _joined(run: RecordedRun, place: Place) -> Figures | None:
    """Return the figures of outputs of which each rank of a coordinate has an own part."""
    records = place.records(run)
    sizes: set[tuple[object, ...]] = set()
    rows: list[Array] = []
    for ranks in run.coordinates:
        own = [records[rank] for rank in ranks if rank in records]
        if len(own) < max(len(ranks), 2) or len({record.shape for record in own}) > 1:
            return None
        given = [record.values for record in own if record.values]
        parts = np.array([float(values[0]) for values in given])  # type: ignore[arg-type]
        shares = (parts / parts.sum())[:, None]
        figures = np.stack([run.array(rank, records[rank]) for rank in ranks])
        mean = (shares * figures[:, :, 0]).sum(0)
        square = (shares * figures[:, :, 1] ** 2).sum(0)
        rows.append(np.stack((mean, np.sqrt(square)), 1))
        sizes.add((int(parts.sum()), *given[0][1:]))
    return (sizes.pop(), np.concatenate(rows)) if len(sizes) == 1 else None


def _pooled(figures: Figures) -> Figures:
    """Return figures of all samples together that do not depend on the order of the elements.

    What has no dimension for samples is distinguished by pieces that are other ones in its parts.
    """
    size, rows = figures
    return size, np.array([[rows[:, 0].mean(), np.sqrt((rows[:, 1] ** 2).mean())]])


def is_that_of_alone(
    candidate: RecordedRun, alone: Sequence[RecordedRun], step: int, name: str
) -> bool:
    """Say whether each coordinate's ranks returned what runs on their data alone return."""
    passes = range(candidate.num_micro(step))
    held = [each for each in passes if name in candidate.names(Kind.OUTPUT, step, each)]
    place = Place(Kind.OUTPUT, step, held[0] if held else 0, name)
    for ranks, run in zip(candidate.coordinates, alone, strict=True):
        theirs, due = place.records(candidate).get(ranks[0]), place.records(run).get(0)
        if theirs is None or due is None or theirs.shape != due.shape:
            return False
        if not np.allclose(candidate.array(ranks[0], theirs), run.array(0, due), rtol=_ALIKE):
            return False
    return True


def is_reordered(pair: Pair) -> bool:
    """Say whether each sample has the same values in another order.

    Then their mean and their size agree, and the mean with weights by their places does not.
    """
    moved = np.abs(pair.candidate - pair.reference).max(0)
    return len(moved) > 2 and bool(moved[:2].max() <= _ROUNDED * moved[2])


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
