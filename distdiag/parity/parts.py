"""Where the parts of parameters that a program spreads by hand belong in the whole.

Each rank holds other experts, or other rows of a weight, and no mesh tells which. Before the first
step a part is a slice of the whole to the bit, or one of the numbered parameters of the whole.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.parity.rank_files import Array, Recorded
from distdiag.parity.recorded_run import RecordedRun, Spot
from distdiag.record.recording import Kind

# Parameters whose parts no mesh puts together: whether they may be those of the whole.
#
# A layer that splits its weights by hand has a part of another shape on each rank. Where in the
# whole a part belongs is not known, but the sum and the sum of squares of all values do not depend
# on that.

SAME: Final = 1e-9
"""Sums of the same values in another order differ by no more of themselves."""
DEVIATIONS: Final = 8.0
FEWEST_VALUES: Final = 256
LEAST_CHANGE: Final = 0.05


class Moments(NamedTuple):
    """Sums of the powers of all values of a parameter."""

    size: int
    first: float
    second: float
    fourth: float

    @property
    def spread(self) -> float:
        """How far the mean square of so many values is off by chance, as a share of it."""
        mean = self.second / self.size
        return math.sqrt(max(self.fourth / self.size / mean**2 - 1, 0.0) / self.size)


class Parts(NamedTuple):
    """What comparing the parts with the whole says; a difference is one of their scale."""

    are_same: bool
    difference: Difference | None


def compare_parts(reference: RecordedRun, candidate: RecordedRun, name: str) -> Parts | None:
    """Compare a parameter before the first step; None if the parts are not all of the whole."""
    ours, theirs = _moments(reference, name), _moments(candidate, name)
    if ours is None or theirs is None or ours.size != theirs.size:
        return None
    if not (math.isfinite(ours.fourth) and math.isfinite(theirs.fourth)):
        return None
    largest = math.sqrt(ours.size * ours.second)
    if (
        abs(theirs.first - ours.first) <= SAME * largest
        and abs(theirs.second - ours.second) <= SAME * ours.second
    ):
        return Parts(are_same=True, difference=None)
    if ours.size < FEWEST_VALUES or not ours.second or not theirs.second:
        return Parts(are_same=False, difference=None)
    factor = math.sqrt(theirs.second / ours.second)
    chance = math.hypot(ours.spread, theirs.spread) / 2  # of a root: half of that of its square
    bound = max(DEVIATIONS * chance, LEAST_CHANGE)
    ratio = abs(math.log(factor)) / bound
    found = Difference(name=name, measured=abs(factor - 1), bound=bound, ratio=ratio, factor=factor)
    return Parts(are_same=False, difference=found if ratio > 1 else None)


def _moments(run: RecordedRun, name: str) -> Moments | None:
    distinct: dict[str, Array] = {}
    for rank, record in run.by_rank(Kind.START, 0, 0, name).items():
        if record.num_bytes and record.part == record.shape:
            distinct.setdefault(record.digest, run.array(rank, record))
    if not distinct:
        return None
    values = np.concatenate([part.ravel() for part in distinct.values()])
    squares = values * values
    return Moments(len(values), float(values.sum()), float(squares.sum()), float(squares @ squares))


# Finds the place of each part.

Spots = Mapping[tuple[int, str], Spot]
"""Where what a rank holds under a name belongs."""

_NUMBER: Final = re.compile(r"(?<![^./])\d+(?![^.])")


class Piece(NamedTuple):
    """What the ranks of one island hold together under a name before the first step."""

    ranks: tuple[int, ...]
    name: str
    values: Recorded


class Choice(NamedTuple):
    """A piece, and the spots of the reference that hold the same values."""

    piece: Piece
    spots: tuple[Spot, ...]


def find_spots(reference: RecordedRun, candidate: RecordedRun) -> Spots:
    """Return where the parts belong that differ from rank to rank, if that is beyond doubt."""
    patterns: dict[str, list[str]] = defaultdict(list)
    for name in reference.names(Kind.START, 0):
        patterns[_NUMBER.sub("#", name)].append(name)
    choices: list[Choice] = []
    held = candidate.names(Kind.START, 0)
    for name in held:
        pieces = list(_pieces(candidate, name))
        names = patterns[_NUMBER.sub("#", name)]
        if not set(names) <= set(held) or _is_spread(reference, name, pieces):
            found = [Choice(each, tuple(_spots(reference, names, each))) for each in pieces]
            choices += found if all(each.spots for each in found) else []
    return _complete(_decided(choices))


def num_parts(spots: Spots) -> int:
    """Return over how many holders the parameters are spread, 0 if they are not."""
    held: dict[int, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for (rank, _), spot in spots.items():
        held[rank].add((spot.name, spot.at))
    return len({frozenset(each) for each in held.values()})


def experts_of(reference: RecordedRun, spots: Spots) -> frozenset[str]:
    """Return the modules that each rank holds others of: their samples come from anywhere.

    A slice of a matrix may as well be rows of a weight that all samples meet.
    """
    own = {name for (_, name), spot in spots.items() if spot.name != name}
    own |= {spot.name for spot in spots.values() if spot.name in own or _is_stacked(spot, spots)}
    shared = [name for name in reference.names(Kind.START, 0) if name not in own]
    modules = {".".join(name.split(".")[:end]) for name in own for end in range(1, name.count("."))}
    modules |= {name.rpartition(".")[0] for name in own}
    return frozenset(m for m in modules if not any(name.startswith(f"{m}.") for name in shared))


def _is_stacked(spot: Spot, spots: Spots) -> bool:
    same = (each for each in spots.values() if each.name == spot.name)
    return len(spot.shape) > 2 and any(each.at[0] for each in same)


def _pieces(run: RecordedRun, name: str) -> Iterator[Piece]:
    """Yield what each island holds: the ranks of a mesh, or a rank by itself."""
    records = run.by_rank(Kind.START, 0, 0, name)
    writers = {each.digest: rank for rank, each in records.items() if each.num_bytes}
    seen: set[tuple[int, ...]] = set()
    for rank, record in records.items():
        island = record.among or (rank,)
        if island in seen:
            continue
        seen.add(island)
        source = island if record.among else (writers.get(record.digest, rank),)
        values = run.as_recorded(Kind.START, 0, name, among=source)
        if values is not None:
            yield Piece(island, name, values)


def _is_spread(reference: RecordedRun, name: str, pieces: list[Piece]) -> bool:
    if not pieces:
        return False
    first = pieces[0].values
    whole = reference.by_rank(Kind.START, 0, 0, name).values()
    if any(record.shape != first.shape for record in whole) or not whole:
        return True
    return not all(np.array_equal(first, each.values, equal_nan=True) for each in pieces[1:])


def _spots(reference: RecordedRun, names: list[str], piece: Piece) -> Iterator[Spot]:
    """Yield the slices of the parameter of this name, or those of other numbers, that are this."""
    for name in dict.fromkeys([piece.name, *names]):
        whole = reference.as_recorded(Kind.START, 0, name)
        if whole is None or whole.ndim != piece.values.ndim:
            continue
        if whole.shape == piece.values.shape:
            if np.array_equal(whole, piece.values):
                yield Spot(name, whole.shape, (0,) * whole.ndim)
        elif name == piece.name:
            yield from _slices(name, whole, piece.values)


def _slices(name: str, whole: Recorded, part: Recorded) -> Iterator[Spot]:
    unlike = [axis for axis in range(whole.ndim) if whole.shape[axis] != part.shape[axis]]
    if len(unlike) != 1 or not part.size or whole.shape[unlike[0]] % part.shape[unlike[0]]:
        return
    size = part.shape[unlike[0]]
    for start in range(0, whole.shape[unlike[0]], size):
        at = tuple(start if axis in unlike else 0 for axis in range(whole.ndim))
        if np.array_equal(
            whole[tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))], part
        ):
            yield Spot(name, whole.shape, at)


def _decided(choices: list[Choice]) -> list[tuple[Piece, Spot]]:
    """Choose a spot of each piece; of like ones that where the neighbours of the piece belong.

    A bias of zeros fits anywhere, but the weights beside it do not.
    """
    sure = [(each.piece, each.spots[0]) for each in choices if len(each.spots) == 1]
    shares = {(piece.ranks, _share(piece, spot)) for piece, spot in sure}
    owners: dict[tuple[tuple[int, ...], str], set[str]] = defaultdict(set)
    for piece, spot in sure:
        for ours, theirs in _owners(piece, spot):
            owners[piece.ranks, ours].add(theirs)
    for piece, spots in choices:
        beside = [
            spot
            for spot in spots
            if (piece.ranks, _share(piece, spot)) in shares and _is_beside(piece, spot, owners)
        ]
        if len(spots) > 1 == len(beside):
            sure.append((piece, beside[0]))
    return sure


def _is_beside(
    piece: Piece, spot: Spot, owners: Mapping[tuple[tuple[int, ...], str], set[str]]
) -> bool:
    """Say whether the innermost module of which anything is known is in the same place."""
    for ours, theirs in _owners(piece, spot):
        if (piece.ranks, ours) in owners:
            return theirs in owners[piece.ranks, ours]
    return piece.name == spot.name


def _share(piece: Piece, spot: Spot) -> tuple[int, int]:
    """Return which of how many slices of the whole a piece is."""
    parts = math.prod(spot.shape) // max(piece.values.size, 1)
    numbers = [a // n for a, n in zip(spot.at, piece.values.shape, strict=True) if a]
    return (numbers[0] if numbers else 0, parts)


def _owners(piece: Piece, spot: Spot) -> list[tuple[str, str]]:
    """Return the modules that hold a piece, from the inside, beside those of its spot."""
    ours, theirs = piece.name.split("."), spot.name.split(".")
    ends = range(len(ours) - 1, 0, -1)
    return [(".".join(ours[:end]), ".".join(theirs[:end])) for end in ends]


def _complete(decided: list[tuple[Piece, Spot]]) -> Spots:
    """Keep what fills a parameter of the reference wholly and once."""
    filled: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for piece, spot in decided:
        filled[spot.name][spot.at] = piece.values.size
    shapes = {spot.name: spot.shape for _, spot in decided}
    whole = {name for name, by in filled.items() if sum(by.values()) == math.prod(shapes[name])}
    return {
        (rank, piece.name): spot
        for piece, spot in decided
        if spot.name in whole
        for rank in piece.ranks
    }
