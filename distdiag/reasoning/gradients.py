"""Over which ranks a gradient was combined, and by what its sum was divided: as measured.

What the backward passes of the ranks gave is put beside what their optimizers found. A group is
right if one divisor explains all parameters; it is not asked who has combined them, and how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Final, NamedTuple

from distdiag.gradient_event import GradientSum
from distdiag.gradient_view import GradientLook, Ranks

TOLERANCE: Final = 0.03
FEWEST: Final = 3
_WEAK: Final = 0.1
"""Sums that are so small a part of what was added up are mostly rounding."""


class Combined(NamedTuple):
    """A gradient is the sum of what `members` gave, divided by `divisor`.

    The divisor contains all that has scaled the gradients since, such as clipping.
    """

    members: Ranks
    divisor: float


def combined_on(
    looks: Sequence[GradientLook], rank: int, is_wanted: Callable[[str], bool] = lambda _: True
) -> Combined | None:
    """Return how the wanted gradients of a rank were combined; None if that is not clear.

    Several looks are taken together, as if nothing had scaled one of them otherwise.
    """
    everyone = set.intersection(*(set(look.by_rank) for look in looks))
    found = list(_explanations(looks, rank, is_wanted, everyone))
    return found[0] if len(found) == 1 else None


def copied_on(look: GradientLook, rank: int) -> Combined | None:
    """Return how the gradients of a rank were combined, without ranks that have given copies.

    What ranks gave that compute the same explains the same sum, with a greater divisor.
    """
    found = list(_explanations((look,), rank, lambda _: True, set(look.by_rank)))
    if not found:
        return None
    least = min(found, key=lambda each: len(each.members))
    share = least.divisor / len(least.members)
    for each in found:
        is_same = abs(each.divisor / len(each.members) - share) <= TOLERANCE * share
        if not (set(least.members) <= set(each.members) and is_same):
            return None
    return least


def _explanations(
    looks: Sequence[GradientLook], rank: int, is_wanted: Callable[[str], bool], everyone: set[int]
) -> Iterator[Combined]:
    for members in candidates(looks[0], rank):
        values = [
            divisor
            for look in looks
            if set(members) <= everyone
            for divisor in divisors(look, rank, members, filter(is_wanted, look.named(rank)))
        ]
        divisor = one_of(values)
        if divisor is not None:
            yield Combined(members, divisor)


def candidates(look: GradientLook, rank: int) -> Iterator[Ranks]:
    """Yield the groups that may have combined gradients of a rank."""
    groups = {(rank,), tuple(sorted(look.by_rank)), *look.groups}
    yield from sorted(g for g in groups if rank in g and set(g) <= look.by_rank.keys())


def divisors(
    look: GradientLook, rank: int, members: Ranks, names: Iterable[str]
) -> Iterator[float]:
    """Yield, for each gradient that tells it, by what the sum over these ranks was divided."""
    for name in names:
        gradients = [look.named(each).get(name) for each in members]
        there = [each for each in gradients if each is not None]
        if len(there) == len(members) and (own := look.named(rank)[name]) in there:
            divisor = _divisor(members, own, there)
            if divisor is not None:
                yield divisor


def _divisor(members: Ranks, own: GradientSum, gradients: Sequence[GradientSum]) -> float | None:
    figures = [(each.given, each.norm, each.applied) for each in gradients]
    if not all(math.isfinite(value) for each in figures for value in each):
        return None
    if any(each.left != 0 for each in gradients):
        return None
    given = sum(each.given for each in gradients)
    applied = own.applied
    if own.members:
        if tuple(sorted(own.members)) != members or not own.num_copies:
            return None
        applied = sum(each.applied for each in gradients) / own.num_copies
    if abs(given) < _WEAK * math.hypot(*(each.norm for each in gradients)):
        return None
    return given / applied if applied else math.inf


def one_of(values: Sequence[float], fewest: int = FEWEST) -> float | None:
    """Return the value that all have, but for rounding; None if there is none."""
    if len(values) < fewest:
        return None
    middle = median(values)
    if not math.isfinite(middle) or middle <= 0:
        return None
    is_one = all(abs(value - middle) <= TOLERANCE * middle for value in values)
    return middle if is_one else None
