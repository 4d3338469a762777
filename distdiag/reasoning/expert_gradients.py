"""By how much the gradients of experts differ from what dense parameters get for the same tokens.

A rank's experts get the gradients of all tokens that an all-to-all has brought to it, so that the
sum over the ranks of the exchange is made already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from distdiag.gradient_view import GradientLook, GradientView, Ranks
from distdiag.reasoning.expert_paths import ExpertPath, expert_paths, factor_of, scales_of
from distdiag.reasoning.gradients import (
    TOLERANCE,
    Combined,
    candidates,
    combined_on,
    divisors,
    one_of,
)


class Coverage(Enum):
    """Whose tokens the gradient of an expert sums up, beside that of a dense parameter."""

    SAME = auto()
    REPEATED = auto()  # all of them several times
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class ExpertGradients:
    """The experts of one rank.

    `exchange` are the ranks whose tokens reach them; `experts` says how their gradients were
    combined, `dense` how all others were; `factor` is what the backward pass of the exchange
    multiplies gradients by, `scales` are what other functions do. `are_different`: other ranks of
    the group hold other experts under the same names. `are_tables`: they are tables of embeddings,
    of which each sample is sent some rows.
    """

    rank: int
    step: int
    names: tuple[str, ...]
    exchange: Ranks
    dense: Combined
    experts: Combined
    factor: float
    scales: frozenset[float]
    are_different: bool
    are_tables: bool = False

    @property
    def excess(self) -> float:
        """How many times what it would be if they were dense parameters."""
        return self.factor * self.dense.divisor / self.experts.divisor

    @property
    def is_explained(self) -> bool:
        """Whether something that scales gradients elsewhere may make up for it."""
        return any(abs(self.excess * scale - 1) <= 2 * TOLERANCE for scale in self.scales)

    def multiple(self) -> int:
        """Return how many times too large they are, negative if too small; 0 if neither."""
        times = max(self.excess, 1 / self.excess)
        whole = round(times)
        if whole < 2 or abs(times - whole) > 2 * TOLERANCE * whole:
            return 0
        if len(self.dense.members) % whole:
            return 0
        return whole if self.excess > 1 else -whole


@dataclass(frozen=True, slots=True)
class _Part:
    """What one look tells of one rank."""

    look: GradientLook
    names: frozenset[str]
    exchange: Ranks
    factors: tuple[float, ...]
    dense: Combined
    scales: frozenset[float]


def expert_gradients(view: GradientView) -> dict[int, ExpertGradients]:
    """Return what is known of the experts of each rank."""
    found = {}
    for rank in view.ranks:
        looks = [look for look in view.looks if rank in look.by_rank]
        parts = [_part(look, rank, looks) for look in looks]
        known = [part for part in parts if part is not None]
        result = _of(rank, known) if known else None
        if result is not None:
            found[rank] = result
    return found


def coverage(one: ExpertGradients, others: Mapping[int, ExpertGradients]) -> Coverage:
    """Compare whose tokens are summed up."""
    if not others.keys() >= set(one.experts.members):
        return Coverage.OTHER
    counts = Counter(rank for member in one.experts.members for rank in others[member].exchange)
    if counts.keys() != set(one.dense.members) or len(set(counts.values())) != 1:
        return Coverage.OTHER
    return Coverage.SAME if set(counts.values()) == {1} else Coverage.REPEATED


def _part(look: GradientLook, rank: int, looks: Sequence[GradientLook]) -> _Part | None:
    paths = list(expert_paths(look, rank))
    if len({path.exchange for path in paths}) != 1:
        return None
    factors = [factor_of(look, rank, path) for path in paths]
    known = [factor for factor in factors if factor is not None]
    names = frozenset(name for path in paths for name in path.names)
    # A model with few dense parameters tells it by several looks only.
    dense = combined_on([look], rank, lambda name: name not in names)
    dense = dense or combined_on(looks, rank, lambda name: name not in names)
    if dense is None or len(known) < len(factors) or not _is_shared(look, dense, paths):
        return None
    scales = scales_of(look, rank)
    return _Part(look, names, paths[0].exchange, tuple(known), dense, scales)


def _is_shared(look: GradientLook, dense: Combined, paths: Sequence[ExpertPath]) -> bool:
    """Say whether all ranks that combine dense gradients were seen, those of the exchange too."""
    return set(paths[0].exchange) <= set(dense.members) <= look.by_rank.keys()


def _of(rank: int, known: Sequence[_Part]) -> ExpertGradients | None:
    first = known[0]
    factor = one_of([factor for part in known for factor in part.factors], fewest=1)
    if factor is None or any(part.exchange != first.exchange for part in known):
        return None
    found = []
    for members in candidates(first.look, rank):
        # Clipping scales all gradients by one factor: the ratio to the dense ones stays.
        ratios = [
            divisor / part.dense.divisor
            for part in known
            if set(members) <= part.look.by_rank.keys()
            for divisor in divisors(part.look, rank, members, part.names)
        ]
        if (ratio := one_of(ratios)) is not None:
            found.append(Combined(members, ratio * first.dense.divisor))
    if len(found) != 1:
        return None
    return ExpertGradients(
        rank=rank,
        step=first.look.step,
        names=tuple(sorted(first.names)),
        exchange=first.exchange,
        dense=first.dense,
        experts=found[0],
        factor=factor,
        scales=frozenset().union(*(part.scales for part in known)),
        are_different=_are_different(first.look, found[0].members, first.names),
        are_tables=_are_tables(first, rank),
    )


def _are_tables(part: _Part, rank: int) -> bool:
    # Of many experts only some gradients are read, though all are known by name.
    return all(
        each.is_table for each in part.look.by_rank[rank].gradients if each.name in part.names
    )


def _are_different(look: GradientLook, members: Ranks, names: frozenset[str]) -> bool:
    for name in sorted(names):
        there = [look.named(rank).get(name) for rank in members]
        weights = [each.weight for each in there if each is not None and not each.members]
        if weights and max(weights) - min(weights) > 1e-6 * max(map(abs, weights)):
            return True
    return False
