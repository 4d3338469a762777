"""What an optimizer applies, as a combination of what the backward passes of each rank gave.

Whatever stands between the two (wrappers, hooks, clipping, the program itself) is linear, and in a
right program all parameters that are treated alike share one vector of coefficients. The weighted
sums of many parameters are more equations than there are coefficients, so that the vector is
measured, and a parameter that does not share it is seen.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    LEFT: it was there before the passes. `is_earlier`: it is a pass of the step before.
    """

    ranks: Ranks
    number: int
    is_earlier: bool = False


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
of tokens, which may be intended, differ by more."""

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
    compared with what a source gave. `kept` are the parameters to which such a one is applied.
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
    kept: tuple[str, ...] = ()

    @property
    def greatest(self) -> float:
        """The greatest absolute value of a coefficient of what was given."""
        return max(map(abs, self._given()), default=0.0)

    def is_nothing(self, source: Source) -> bool:
        """Say whether what this source gave is not applied."""
        size = self.left_size if source.number == LEFT else 1.0
        return abs(self.vector[source]) * size <= ALIKE * self.greatest

    def common(self) -> float | None:
        """Return the coefficient of all passes of all ranks, None if they differ."""
        values = self._given()
        if not values or max(values) - min(values) > 2 * ALIKE * self.greatest:
            return None
        return sum(values) / len(values)

    def _given(self) -> list[float]:
        return [value for source, value in self.vector.items() if source.number != LEFT]


@dataclass(frozen=True, slots=True)
class ContributionView(View):
    """What became of the gradients of one model in all sampled steps so far.

    `events` are those of the first sampled step. `copies` are the parameters that were the same
    then on all ranks that hold them, `plans` are those of any rank. `stale` are the steps before
    which a gradient was there that had been applied in the step before. `frozen` are those that
    apply what the first sampled step did, number for number, though other gradients were given.
    """

    model: str
    ranks: RankSet
    found: tuple[Contribution, ...]
    events: Mapping[int, GradientSums]
    copies: frozenset[str] = frozenset()
    plans: Mapping[str, TensorPlan] = field(default_factory=dict)
    stale: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()

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
    if not left:
        return False
    one, other = np.array(left).ravel(), np.array(applied).ravel()
    square = float(other @ other)
    factor = float(one @ other) / square if square else 0.0
    return factor > 0 and bool(np.linalg.norm(one - factor * other) <= ALIKE * np.linalg.norm(one))


def is_frozen(first: Mapping[int, GradientSums], now: Mapping[int, GradientSums]) -> bool:
    """Say whether a step applies the very gradients of an earlier one, and was given others."""
    found = []
    for rank in first.keys() & now.keys():
        old = {each.name: each for each in first[rank].gradients}
        pairs = [(old[each.name], each) for each in now[rank].gradients if each.name in old]
        found += [
            one.applied == other.applied
            for one, other in pairs
            if any(one.applied) and any(other.applied) and one.passes != other.passes
        ]
    return len(found) >= FEWEST and all(found)


_Named = Mapping[int, GradientSum]


class _Part(NamedTuple):
    """What some ranks apply in one step, and what all that hold it gave: for it, and before."""

    step: int
    ranks: Ranks
    holders: Ranks
    named: Mapping[str, _Named]
    earlier: Mapping[str, _Named]

    @property
    def is_sharded(self) -> bool:
        """Whether each rank applies a part."""
        return bool(next(iter(next(iter(self.named.values())).values())).members)

    @property
    def num_passes(self) -> int:
        """How many passes any of the ranks ran."""
        return max(len(each.passes) for held in self.named.values() for each in held.values())


_SCALINGS: Final = 4
"""Averaging, unscaling, clipping and a conversion may round each number once more."""


def contributions_of(
    step: int,
    by_rank: Mapping[int, GradientSums],
    before: Mapping[int, GradientSums] | None = None,
) -> Iterator[Contribution]:
    """Yield, for each set of ranks that apply the same, how it is combined.

    `before` is what is known of the step before.
    """
    earlier = _by_name(before or {})
    groups: dict[Ranks, dict[str, _Named]] = {}
    for name, held in _by_name(by_rank).items():
        groups.setdefault(tuple(held), {})[name] = held
    for holders, named in groups.items():
        for ranks, names in _targets(holders, named):
            if len(holders) > 1 and len(names) >= FEWEST:
                mine = {name: named[name] for name in names}
                found = _contribution(_Part(step, ranks, holders, mine, earlier))
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


def _contribution(part: _Part) -> Contribution | None:
    for split in _SPLITS:
        sources, equations = _equations(split, part)
        num_rows = sum(len(each.applied) for each in equations)
        if not 0 < len(sources) <= min(_MOST_COLUMNS, num_rows // 2):
            continue
        best = _best(equations)
        vector = None if best is None else _checked(best)
        if best is None or vector is None:
            continue  # the columns may be too much alike to be told apart
        shared = set(best.names)
        odd = [each for each in equations if each.name not in shared and each.norms.any()]
        found = dict(zip(sources, vector, strict=True))
        kept = _kept(part, odd, best)
        if any(source.number == LEFT for source in found):
            kept += [name for name in best.names if _has_left(part.named[name])]
        return Contribution(
            part.step,
            part.ranks,
            part.holders,
            part.num_passes,
            found,
            best.names,
            tuple(_outlier(each, best, part) for each in odd if each.name not in kept),
            part.is_sharded,
            _left_size(sources, equations),
            tuple(kept),
        )
    return _alone(part) if part.is_sharded else None


def _has_left(held: _Named) -> bool:
    return any(each.has_left for each in held.values())


def _kept(part: _Part, odd: Sequence[Equations], vector: Vector) -> list[str]:
    """Return parameters that share the vector but for a gradient that was there before."""
    names = []
    for each in odd:
        left, norm = _left(Source(part.ranks, LEFT), part.named[each.name])
        if norm > 0:
            rest = each.applied - each.given @ vector.coefficients
            factor = float(left @ rest) / norm**2
            given, norms = np.column_stack([each.given, left]), np.append(each.norms, norm)
            whole = replace(each, given=given, norms=norms)
            if vector.precision.explains(whole, np.append(vector.coefficients, factor)):
                names.append(each.name)
    return names


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


def _outlier(equations: Equations, vector: Vector, part: _Part) -> Outlier:
    factor = factor_of(equations, vector.coefficients, vector.precision)
    giver = None if factor is not None else _giver(equations.name, part, vector.precision)
    return Outlier(equations.name, factor, giver)


def _giver(name: str, part: _Part, precision: Precision) -> int | None:
    """Return the one rank whose passes alone explain what is applied."""
    held = part.named[name]
    sources = [Source((rank,), ALL) for rank in held]
    equations = _of_name(name, sources, part)
    units = np.eye(len(sources))
    found = [
        rank
        for rank, unit in zip(held, units, strict=True)
        if factor_of(equations, unit, precision)
    ]
    return found[0] if len(found) == 1 else None


_QUIET: Final = Precision(noise=1 / 32)
"""What mostly is rounded is less than this part of what may be."""


def _alone(part: _Part) -> Contribution | None:
    """Return what is known of shards of which no vector is shared: some were given by one rank."""
    found = [Outlier(name, giver=_giver(name, part, _QUIET)) for name in part.named]
    if all(each.giver is None for each in found):
        return None
    step, ranks, holders = part[:3]
    others = tuple(found)
    return Contribution(step, ranks, holders, part.num_passes, {}, (), others, is_sharded=True)


def own_factor(event: GradientSums) -> float | None:
    """Return the one factor by which a rank applies what it gave alone; None if there is none."""
    known = [
        _only_mine(each) for each in event.gradients if each.passes and each.applied and each.norm
    ]
    factors = [None if e is None else factor_of(e, np.ones(1), _QUIET) for e in known]
    found = [factor for factor in factors if factor is not None]
    if len(found) < len(factors) or not found:
        return None
    middle = float(np.median(found))
    is_one = all(abs(factor - middle) <= ALIKE * middle for factor in found)
    return middle if is_one and middle > 0 else None


def _only_mine(each: GradientSum) -> Equations | None:
    if each.members or each.has_left or not _is_known(each):
        return None
    given = np.sum(np.array(each.passes), axis=0)[:, None]
    number = len(each.passes) + _SCALINGS
    norms = np.array([sum(each.norms)])
    return Equations(each.name, given, norms, np.array(each.applied), each.rounding, number)


# Columns: each pass of each rank if there are equations enough, else fewer.

_Split = Callable[[_Part], list[Source]]


def _by_rank_and_pass(part: _Part) -> list[Source]:
    return [
        Source((rank,), number)
        for rank in part.holders
        for number in range(max(len(held[rank].passes) for held in part.named.values()))
    ]


def _by_rank(part: _Part) -> list[Source]:
    return [Source((rank,), ALL) for rank in part.holders]


def _by_side_and_pass(part: _Part) -> list[Source]:
    numbers = {len(each.passes) for held in part.named.values() for each in held.values()}
    if len(numbers) > 1:
        return []
    return [Source(side, number) for side in _sides(part) for number in range(max(numbers))]


def _by_side(part: _Part) -> list[Source]:
    return [Source(side, ALL) for side in _sides(part)]


def _by_side_pass_and_step(part: _Part) -> list[Source]:
    """Of several passes, some of the step before may come late."""
    if part.num_passes < 2 or not all(_are_known(part, name) for name in part.named):
        return []
    now = _by_side_and_pass(part)
    return [*now, *(source._replace(is_earlier=True) for source in now)]


def _are_known(part: _Part, name: str) -> bool:
    before, now = part.earlier.get(name, {}), part.named[name]
    return before.keys() >= now.keys() and all(
        len(before[rank].passes) == len(each.passes) for rank, each in now.items()
    )


def _sides(part: _Part) -> list[Ranks]:
    others = tuple(rank for rank in part.holders if rank not in part.ranks)
    return [side for side in (part.ranks, others) if side]


_SPLITS: Final[tuple[_Split, ...]] = (
    _by_rank_and_pass,
    _by_rank,
    _by_side_and_pass,
    _by_side,
    _by_side_pass_and_step,
)


def _equations(split: _Split, part: _Part) -> tuple[list[Source], list[Equations]]:
    sources = split(part)
    if not sources:
        return [], []
    # Where few have a gradient from before, the others tell the vector without it.
    if 2 * sum(map(_has_left, part.named.values())) > len(part.named):
        sources = [*sources, Source(part.ranks, LEFT)]
    found = [_of_name(name, sources, part) for name in part.named]
    return _merged(sources, found)


def _of_name(name: str, sources: Sequence[Source], part: _Part) -> Equations:
    held, earlier = part.named[name], part.earlier.get(name, {})
    columns = [_column(each, earlier if each.is_earlier else held) for each in sources]
    first = held[part.ranks[0]]
    applied = np.array(first.applied)
    if first.members:
        applied = np.sum([held[rank].applied for rank in first.members], axis=0)
        applied = applied / first.num_copies
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
        if same and sources[same[0]][1:] == source[1:]:
            ranks[same[0]] += source.ranks
        else:
            kept.append(index)
            ranks[index] = list(source.ranks)
    merged = [sources[index]._replace(ranks=tuple(ranks[index])) for index in kept]
    return merged, [
        Equations(e.name, e.given[:, kept], e.norms[kept], e.applied, e.rounding, e.num_roundings)
        for e in found
    ]


def _are_same(one: Array, other: Array) -> bool:
    return bool(np.abs(one - other).max() <= _SAME * np.abs(one).max())
