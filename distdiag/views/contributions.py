"""What an optimizer applies, as a combination of what the backward passes of each rank gave.

Whatever stands between the two (wrappers, hooks, clipping, the program itself) is linear, and in a
right program all parameters that are treated alike share one vector of coefficients. The weighted
sums of many parameters are more equations than there are coefficients, so that the vector is
measured, and a parameter that does not share it is seen.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from distdiag.events.base import CallSite
from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.events.models import TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

Ranks = tuple[int, ...]
Array = npt.NDArray[np.float64]

# What is known of one parameter: equations between what was given and what is applied.


class Source(NamedTuple):
    """Who gave a gradient: these ranks, in one backward pass, from 0 on, or in all of them.

    LEFT: it was there before the passes.
    """

    ranks: Ranks
    number: int


ALL: Final = -1
LEFT: Final = -2


@dataclass(frozen=True, slots=True)
class Equations:
    """One parameter: a column for each source, a row for each weighted sum.

    `norms` bound what each source gave. `num_roundings` is how often a number was rounded on its
    way, each time by `rounding` at most, relative to it.
    """

    name: str
    given: Array
    norms: Array
    applied: Array
    rounding: float
    num_roundings: int

    def bounds(self, coefficients: Array, rounding: float = 0.0) -> Array:
        """Return how far each sum may be off.

        The errors of many elements are bounded and independent: by Hoeffding's inequality their sum
        exceeds `_UNLIKELY` times the root of the squared bounds once in 10^13. Where all elements
        are rounded alike, the sum is off by as much as each of them.
        """
        each = max(self.rounding, rounding) * self.num_roundings
        added = float(np.abs(coefficients) @ self.norms)
        return each * (np.abs(self.applied) + np.abs(self.given @ coefficients) + _UNLIKELY * added)

    def miss(self, coefficients: Array, rounding: float = 0.0) -> float:
        """Return how far what these coefficients give is off, as a part of what it may be."""
        off = np.abs(self.applied - self.given @ coefficients)
        bounds = self.bounds(coefficients, rounding)
        return float(np.max(off / np.maximum(bounds, np.finfo(np.float64).tiny)))


_UNLIKELY: Final = 8.0
_SAME: Final = 1e-9
"""Sums of the same numbers, added up in another order, differ by less."""

FEWEST: Final = 3
"""Of fewer parameters nothing tells that they should share a vector."""

COARSE: Final = 2.0**-8
"""Half a unit in the last place of bfloat16, the coarsest type in which gradients are sent."""

ALIKE: Final = 0.01
"""Coefficients are the same, or nothing, up to this part of the greatest one: weights by the counts
of tokens, which may be meant, differ by more."""

_MANY_TIMES: Final = 8.0
"""So many times what half of them are off by, no parameter is."""

_MOST_VECTORS: Final = 4
_MOST_ROUNDS: Final = 40
_MOST_COLUMNS: Final = 48
_MOST_TARGETS: Final = 16
"""More would take the engine seconds for each step; what they do not tell apart is added up."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How precisely gradients were combined: each number as in a type that rounds so coarsely.

    `noise` is what half of the parameters are off by, as a part of what they may be.
    """

    rounding: float = 0.0
    noise: float = 1.0

    def explains(self, equations: Equations, coefficients: Array) -> bool:
        """Say whether these coefficients give what is applied.

        Mostly much less is rounded than may be. What one rounding may do is always granted.
        """
        most = min(1.0, max(_MANY_TIMES * self.noise, 1 / equations.num_roundings))
        return equations.miss(coefficients, self.rounding) <= most


@dataclass(frozen=True, slots=True)
class Vector:
    """Coefficients that several parameters share, and by how much each may be off."""

    coefficients: Array
    errors: Array
    names: tuple[str, ...]
    precision: Precision


def solve(equations: Sequence[Equations]) -> Vector | None:
    """Return the vector that most of these parameters share; None if none is measured."""
    for rounding in (0.0, COARSE):
        found = _solve(equations, rounding)
        if found is not None:
            return found
    return None


def _solve(equations: Sequence[Equations], rounding: float) -> Vector | None:
    known = [each for each in equations if each.norms.any()]
    if len(known) < FEWEST:
        return None
    shared = _consensus(known)
    for _ in range(len(known)):
        coefficients = _least_squares(shared)
        noise = float(np.median([each.miss(coefficients, rounding) for each in shared]))
        precision = Precision(rounding, noise)
        kept = [each for each in known if precision.explains(each, coefficients)]
        is_settled = [e.name for e in kept] == [e.name for e in shared]
        shared = kept
        if is_settled or len(shared) < FEWEST:
            break
    num_rows = sum(len(each.applied) for each in shared)
    if len(shared) < FEWEST or num_rows < 2 * shared[0].given.shape[1]:
        return None
    coefficients = _least_squares(shared)
    names = tuple(each.name for each in shared)
    return Vector(coefficients, _errors(shared, coefficients, rounding), names, precision)


def _consensus(equations: Sequence[Equations]) -> list[Equations]:
    """Return the half of the parameters that agree best: those that do not count less and less."""
    weights = np.ones(len(equations))
    order = np.arange(len(equations))
    for _ in range(_MOST_ROUNDS):
        coefficients = _least_squares(equations, weights)
        off = np.array([_distance(each, coefficients) for each in equations])
        order, before = np.argsort(off, kind="stable"), order
        middle = max(float(np.median(off)), 1e-15)
        weights = 1.0 / (np.square(off / middle) + 1e-4)
        if np.array_equal(order, before):
            break
    number = max(FEWEST, (len(equations) + 1) // 2)
    return [equations[index] for index in sorted(order[:number])]


def _distance(each: Equations, coefficients: Array) -> float:
    off = np.abs(each.applied - each.given @ coefficients).max()
    return float(off / each.norms.sum())


def _least_squares(equations: Sequence[Equations], weights: Array | None = None) -> Array:
    rows, sides = _system(equations)
    if weights is not None:
        roots = np.sqrt(np.repeat(weights, [len(each.applied) for each in equations]))
        rows, sides = rows * roots[:, None], sides * roots
    return np.asarray(np.linalg.lstsq(rows, sides, rcond=1e-13)[0], dtype=np.float64)


def _system(equations: Sequence[Equations]) -> tuple[Array, Array]:
    sizes = [each.norms.sum() for each in equations]
    rows = np.concatenate([e.given / size for e, size in zip(equations, sizes, strict=True)])
    sides = np.concatenate([e.applied / size for e, size in zip(equations, sizes, strict=True)])
    return rows, sides


def _errors(equations: Sequence[Equations], coefficients: Array, rounding: float) -> Array:
    """Return how far each coefficient may be off.

    That is what the sums are off by as measured, `_UNLIKELY` times over; but no more than if each
    were as far off as it may be.
    """
    rows, sides = _system(equations)
    if np.linalg.matrix_rank(rows, tol=_SAME * float(np.linalg.norm(rows, 2))) < rows.shape[1]:
        return np.full(rows.shape[1], np.inf)  # these columns cannot be told apart
    inverse = np.linalg.pinv(rows)
    may_be = np.concatenate(
        [each.bounds(coefficients, rounding) / each.norms.sum() for each in equations]
    )
    off = sides - rows @ coefficients
    measured = float(np.sqrt(off @ off / (len(off) - len(coefficients))))
    likely = _UNLIKELY * measured * np.sqrt(np.square(inverse).sum(axis=1))
    return np.asarray(np.minimum(np.abs(inverse) @ may_be, likely), dtype=np.float64)


def factor_of(equations: Equations, coefficients: Array, precision: Precision) -> float | None:
    """Return by what these coefficients are to be multiplied to explain a parameter alone."""
    made = equations.given @ coefficients
    square = float(made @ made)
    if not square > 0:
        return None
    factor = float(made @ equations.applied) / square
    most = equations.bounds(factor * coefficients, precision.rounding).max()
    is_clear = abs(factor) * np.sqrt(square) > most
    return factor if is_clear and precision.explains(equations, factor * coefficients) else None


# The equations of one step: which gradients are those of one parameter, and who applies the same.


@dataclass(frozen=True, slots=True)
class Outlier:
    """A parameter that does not share the vector.

    `factor`: it is the same vector multiplied by this. `giver`: it is what this rank alone gave.
    None: it is neither.
    """

    name: str
    factor: float | None = None
    giver: int | None = None


@dataclass(frozen=True, slots=True)
class Contribution:
    """What `ranks` apply in one step, as a combination of what `holders` gave.

    All these ranks find the same gradients, or `is_sharded`: parts of the same. The vector is that
    of most parameters, `names`. `left_size` is how large a gradient was that was there before,
    compared with what a source gave.
    """

    step: int
    ranks: Ranks
    holders: Ranks
    num_passes: int
    vector: Mapping[Source, float]
    names: tuple[str, ...]
    outliers: tuple[Outlier, ...] = ()
    is_sharded: bool = False
    left_size: float = 1.0

    @property
    def greatest(self) -> float:
        """The greatest absolute value of a coefficient of what was given."""
        given = (abs(value) for source, value in self.vector.items() if source.number != LEFT)
        return max(given, default=0.0)

    def is_nothing(self, source: Source) -> bool:
        """Say whether what this source gave is not applied."""
        size = self.left_size if source.number == LEFT else 1.0
        return abs(self.vector[source]) * size <= ALIKE * self.greatest

    def common(self) -> float | None:
        """Return the coefficient of all passes of all ranks, None if they differ."""
        values = [value for source, value in self.vector.items() if source.number != LEFT]
        if not values or max(values) - min(values) > 2 * ALIKE * self.greatest:
            return None
        return sum(values) / len(values)


@dataclass(frozen=True, slots=True)
class ContributionView(View):
    """What became of the gradients of one model in all sampled steps so far.

    `events` are those of the first sampled step. `copies` are the parameters that were the same
    then on all ranks that hold them, `plans` are those of any rank. `stale` are the steps before
    which a gradient was there that had been applied in the step before.
    """

    model: str
    ranks: RankSet
    found: tuple[Contribution, ...]
    events: Mapping[int, GradientSums]
    copies: frozenset[str] = frozenset()
    plans: Mapping[str, TensorPlan] = field(default_factory=dict)
    stale: frozenset[int] = frozenset()

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.model

    @property
    def site(self) -> CallSite:
        """Where the first sampled backward pass was called."""
        return self.events[min(self.events)].site

    def by_step(self) -> Mapping[int, tuple[Contribution, ...]]:
        """Return what is known of each step."""
        steps = dict.fromkeys(each.step for each in self.found)
        return {step: tuple(e for e in self.found if e.step == step) for step in steps}


def copies_in(by_rank: Mapping[int, GradientSums]) -> frozenset[str]:
    """Return the parameters of which all ranks that hold them hold the same, or shards of one."""
    return frozenset(name for name, found in weights_in(by_rank).items() if are_equal(found))


def weights_in(by_rank: Mapping[int, GradientSums]) -> dict[str, list[float]]:
    """Return the first sums over each parameter on all ranks that hold it, 0.0 for shards."""
    weights: dict[str, list[float]] = {}
    for event in by_rank.values():
        for each in event.gradients:
            weights.setdefault(each.name, []).append(0.0 if each.members else each.weight)
    return weights


def are_equal(weights: Sequence[float]) -> bool:
    """Say whether sums over parameters are those of equal ones."""
    return max(weights) - min(weights) <= _SAME * max(map(abs, weights))


def is_left_over(before: Mapping[int, GradientSums], now: Mapping[int, GradientSums]) -> bool:
    """Say whether what was there before the passes is what was applied before, but for a factor."""
    left, applied = [], []
    for rank in before.keys() & now.keys():
        old = {each.name: each for each in before[rank].gradients}
        for each in now[rank].gradients:
            if each.has_left and each.name in old and old[each.name].applied:
                left.append(each.left)
                applied.append(old[each.name].applied)
    if len(left) < FEWEST:
        return False
    one, other = np.array(left).ravel(), np.array(applied).ravel()
    square = float(other @ other)
    factor = float(one @ other) / square if square else 0.0
    return factor > 0 and bool(np.linalg.norm(one - factor * other) <= ALIKE * np.linalg.norm(one))


_Named = Mapping[int, GradientSum]
_SCALINGS: Final = 4
"""Averaging, unscaling, clipping and a conversion may round each number once more."""


def contributions_of(step: int, by_rank: Mapping[int, GradientSums]) -> Iterator[Contribution]:
    """Yield, for each set of ranks that apply the same, how it is combined."""
    groups: dict[Ranks, dict[str, _Named]] = {}
    for name, held in _by_name(by_rank).items():
        groups.setdefault(tuple(held), {})[name] = held
    for holders, named in groups.items():
        for ranks, names in _targets(holders, named):
            if len(holders) > 1 and len(names) >= FEWEST:
                mine = {name: named[name] for name in names}
                found = _contribution(step, ranks, holders, mine)
                if found is not None:
                    yield found


def _by_name(by_rank: Mapping[int, GradientSums]) -> dict[str, _Named]:
    found: dict[str, dict[int, GradientSum]] = {}
    for rank in sorted(by_rank):
        for each in by_rank[rank].gradients:
            if each.passes and each.applied and _is_known(each):
                found.setdefault(each.name, {})[rank] = each
    return {
        name: held
        for name, held in found.items()
        if len({each.num_elements for each in held.values()}) == 1
    }


def _is_known(each: GradientSum) -> bool:
    values = (*each.applied, *each.left, *each.norms, *(v for sums in each.passes for v in sums))
    is_placed = not each.members or each.num_copies > 0
    return is_placed and all(map(math.isfinite, values))


def _targets(holders: Ranks, named: Mapping[str, _Named]) -> Iterator[tuple[Ranks, list[str]]]:
    """Yield the ranks that apply the same, or shards of the same, and the names of what."""
    sharded: dict[Ranks, list[str]] = {}
    plain = []
    for name, held in named.items():
        members = next(iter(held.values())).members
        if members:
            if set(members) <= set(holders):
                sharded.setdefault(members, []).append(name)
        else:
            plain.append(name)
    yield from sharded.items()
    alike: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for rank in holders if plain else ():
        key = tuple(named[name][rank].applied for name in plain)
        alike.setdefault(key, []).append(rank)
    for ranks in list(alike.values())[:_MOST_TARGETS]:
        yield tuple(ranks), plain


def _contribution(
    step: int, ranks: Ranks, holders: Ranks, named: Mapping[str, _Named]
) -> Contribution | None:
    is_sharded = bool(next(iter(next(iter(named.values())).values())).members)
    num_passes = max(len(each.passes) for held in named.values() for each in held.values())
    for split in _SPLITS:
        sources, equations = _equations(split, ranks, holders, named)
        num_rows = sum(len(each.applied) for each in equations)
        if not 0 < len(sources) <= min(_MOST_COLUMNS, num_rows // 2):
            continue
        best = _best(equations)
        if best is not None:
            vector = _checked(best)
            if vector is None:
                continue  # the columns are too much alike to be told apart
            shared = set(best.names)
            others = [
                _outlier(each, best, ranks, named[each.name])
                for each in equations
                if each.name not in shared and each.norms.any()
            ]
            return Contribution(
                step,
                ranks,
                holders,
                num_passes,
                dict(zip(sources, vector, strict=True)),
                best.names,
                tuple(others),
                is_sharded,
                _left_size(sources, equations),
            )
    return _alone(step, ranks, holders, named, num_passes) if is_sharded else None


def _left_size(sources: Sequence[Source], equations: Sequence[Equations]) -> float:
    norms = np.sum([each.norms for each in equations], axis=0)
    is_left = np.array([source.number == LEFT for source in sources])
    if not is_left.any() or is_left.all():
        return 1.0
    return float(norms[is_left].mean() / norms[~is_left].mean())


def _best(equations: Sequence[Equations]) -> Vector | None:
    """Return the vector that more parameters share than any other."""
    left, best = list(equations), None
    for _ in range(_MOST_VECTORS):
        found = solve(left)
        if found is None:
            break
        if best is None or len(found.names) > len(best.names):
            best = found
        left = [each for each in left if each.name not in found.names]
    return best


def _checked(vector: Vector) -> list[float] | None:
    greatest = float(np.abs(vector.coefficients).max(initial=0.0))
    is_clear = greatest > 0 and bool(np.all(vector.errors <= 10 * ALIKE * greatest))
    return [float(value) for value in vector.coefficients] if is_clear else None


def _outlier(equations: Equations, vector: Vector, ranks: Ranks, held: _Named) -> Outlier:
    factor = factor_of(equations, vector.coefficients, vector.precision)
    giver = None if factor is not None else _giver(equations.name, ranks, held, vector.precision)
    return Outlier(equations.name, factor, giver)


def _giver(name: str, ranks: Ranks, held: _Named, precision: Precision) -> int | None:
    """Return the one rank whose passes alone explain what is applied."""
    sources = [Source((rank,), ALL) for rank in held]
    equations = _of_name(name, sources, ranks, held)
    units = np.eye(len(sources))
    found = [
        rank
        for rank, unit in zip(held, units, strict=True)
        if factor_of(equations, unit, precision)
    ]
    return found[0] if len(found) == 1 else None


_QUIET: Final = Precision(noise=1 / 32)
"""What mostly is rounded is less than this part of what may be."""


def _alone(
    step: int, ranks: Ranks, holders: Ranks, named: Mapping[str, _Named], num_passes: int
) -> Contribution | None:
    """Return what is known of shards of which no vector is shared: some were given by one rank."""
    found = [Outlier(name, giver=_giver(name, ranks, held, _QUIET)) for name, held in named.items()]
    if all(each.giver is None for each in found):
        return None
    return Contribution(step, ranks, holders, num_passes, {}, (), tuple(found), is_sharded=True)


# Columns: each pass of each rank if there are equations enough, else fewer.

_Split = Callable[[Ranks, Ranks, Mapping[str, _Named]], list[Source]]


def _by_rank_and_pass(ranks: Ranks, holders: Ranks, named: Mapping[str, _Named]) -> list[Source]:
    numbers = {rank: max(len(held[rank].passes) for held in named.values()) for rank in holders}
    return [Source((rank,), number) for rank in holders for number in range(numbers[rank])]


def _by_rank(ranks: Ranks, holders: Ranks, named: Mapping[str, _Named]) -> list[Source]:
    return [Source((rank,), ALL) for rank in holders]


def _by_side_and_pass(ranks: Ranks, holders: Ranks, named: Mapping[str, _Named]) -> list[Source]:
    numbers = {len(each.passes) for held in named.values() for each in held.values()}
    if len(numbers) > 1:
        return []
    sides = _sides(ranks, holders)
    return [Source(side, number) for side in sides for number in range(max(numbers))]


def _by_side(ranks: Ranks, holders: Ranks, named: Mapping[str, _Named]) -> list[Source]:
    return [Source(side, ALL) for side in _sides(ranks, holders)]


def _sides(ranks: Ranks, holders: Ranks) -> list[Ranks]:
    others = tuple(rank for rank in holders if rank not in ranks)
    return [side for side in (ranks, others) if side]


_SPLITS: Final[tuple[_Split, ...]] = (_by_rank_and_pass, _by_rank, _by_side_and_pass, _by_side)


def _equations(
    split: _Split, ranks: Ranks, holders: Ranks, named: Mapping[str, _Named]
) -> tuple[list[Source], list[Equations]]:
    sources = split(ranks, holders, named)
    if any(each.has_left for held in named.values() for each in held.values()):
        sources = [*sources, Source(ranks, LEFT)]
    found = [_of_name(name, sources, ranks, held) for name, held in named.items()]
    return _merged(sources, found)


def _of_name(name: str, sources: Sequence[Source], ranks: Ranks, held: _Named) -> Equations:
    columns = [_column(source, held) for source in sources]
    applied = np.array(held[ranks[0]].applied)
    if held[ranks[0]].members:
        applied = np.sum([held[rank].applied for rank in held[ranks[0]].members], axis=0)
        applied = applied / held[ranks[0]].num_copies
    num_passes = max(len(each.passes) for each in held.values())
    return Equations(
        name,
        np.array([column for column, _ in columns]).T,
        np.array([norm for _, norm in columns]),
        applied,
        max(each.rounding for each in held.values()),
        num_passes + len(held) + _SCALINGS,
    )


def _column(source: Source, held: _Named) -> tuple[Array, float]:
    if source.number == LEFT:
        return _left(source, held)
    zero = np.zeros(len(next(iter(held.values())).applied))
    total, norm = zero, 0.0
    for rank in source.ranks:
        each = held[rank]
        chosen = range(len(each.passes)) if source.number == ALL else (source.number,)
        for number in chosen:
            if number < len(each.passes):
                total = total + np.array(each.passes[number])
                norm += each.norms[number]
    return total, norm


def _left(source: Source, held: _Named) -> tuple[Array, float]:
    first = held[source.ranks[0]]
    ranks = first.members or source.ranks[:1]
    sums = [np.array(held[rank].left) for rank in ranks if held[rank].left]
    total = (
        np.sum(sums, axis=0) / max(1, first.num_copies)
        if sums
        else np.zeros_like(np.array(first.applied))
    )
    return total, float(np.linalg.norm(total))


def _merged(sources: list[Source], found: list[Equations]) -> tuple[list[Source], list[Equations]]:
    """Leave out sources that gave nothing, and take those together that gave the same.

    Copies of one batch on several ranks are not told apart by what becomes of them.
    """
    norms = np.array([each.norms for each in found])
    stacked = np.concatenate([each.given for each in found])
    kept: list[int] = []
    ranks: dict[int, list[int]] = {}
    for index, source in enumerate(sources):
        if not norms[:, index].any():
            continue
        same = [k for k in kept if _are_same(stacked[:, k], stacked[:, index])]
        if same and sources[same[0]].number == source.number:
            ranks[same[0]] += source.ranks
        else:
            kept.append(index)
            ranks[index] = list(source.ranks)
    merged = [Source(tuple(ranks[index]), sources[index].number) for index in kept]
    return merged, [
        Equations(e.name, e.given[:, kept], e.norms[kept], e.applied, e.rounding, e.num_roundings)
        for e in found
    ]


def _are_same(one: Array, other: Array) -> bool:
    return bool(np.abs(one - other).max() <= _SAME * np.abs(one).max())
