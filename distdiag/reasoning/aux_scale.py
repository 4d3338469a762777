"""How much a balancing loss weighs in a step, beside the rest of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from distdiag.loss_event import AuxTerm, Factor, LossPass
from distdiag.loss_view import LossWindow
from distdiag.reasoning.coefficients import coefficients_in
from distdiag.reasoning.loss_weights import is_close, total_weight


@dataclass(frozen=True, slots=True)
class AuxScale:
    """A balancing loss weighs `times` as much as its coefficient says.

    `num_ranks` and `num_passes` are by what it is too heavy, 1 if it is not these.
    """

    layer: str
    num_ranks: int
    num_passes: int
    is_sure: bool

    @property
    def times(self) -> int:
        """How much too heavy it is."""
        return self.num_ranks * self.num_passes


def aux_scale_of(window: LossWindow) -> AuxScale | None:
    """Return the first balancing loss of a step that is too heavy for a known reason."""
    passes = [each for _, each in window.passes() if each.num_counted]
    numbers = {len(each.aux) for each in passes}
    if len(numbers) != 1 or not window.num_passes or not total_weight(window):
        return None
    for place in range(numbers.pop()):
        found = _scale(window, [(each, each.aux[place]) for each in passes])
        if found is not None:
            return found
    return None


def _scale(window: LossWindow, terms: list[tuple[LossPass, AuxTerm]]) -> AuxScale | None:
    num_passes, divisor = window.num_passes, window.divisor
    num_ranks = len(window.by_rank)
    counts = {num_passes, num_ranks, num_passes * num_ranks} - {1}
    whole = sum(_weight(aux, counts) for _, aux in terms) / divisor
    ratio = whole / total_weight(window)
    is_by_ranks = divisor > 1 and all(_has_outer(aux, divisor) for _, aux in terms)
    by_ranks = num_ranks if is_by_ranks and divisor == num_ranks else 1
    by_passes = num_passes if _is_main_divided(window) else 1
    ways = [(by_ranks, by_passes), (by_ranks, 1), (1, by_passes)]
    fitting = [way for way in ways if math.prod(way) > 1 and is_close(ratio, math.prod(way))]
    if not fitting:
        return None
    if any(_is_divided(_coefficient(aux), aux.held, counts) for _, aux in terms):
        return None
    literals = coefficients_in(f for event in window.by_rank.values() for f in event.site.frames)
    is_sure = all(aux.is_own_mean and _is_whole(aux, literals, counts) for _, aux in terms)
    return AuxScale(terms[0][1].layer, *fitting[0], is_sure)


def _product(factors: Iterable[Factor]) -> float:
    return math.prod(f.value if f.op == "*" else 1 / f.value for f in factors if f.value)


def _weight(aux: AuxTerm, counts: Iterable[int]) -> float:
    """Return by what a balancing loss is multiplied, its coefficient and constants left out.

    A mean over several balancing losses, such as those of layers, is such a constant.
    """
    inner = aux.factors[aux.num_outer :]
    divisions = [f for f in inner if f.op == "/" and any(is_close(f.value, n) for n in counts)]
    return _product(aux.factors[: aux.num_outer]) * _product(divisions)


def _coefficient(aux: AuxTerm) -> float:
    return _product(f for f in aux.factors[aux.num_outer :] if f.value % 1)


def _is_divided(value: float, held: tuple[int, ...], counts: Iterable[int]) -> bool:
    """Say whether a coefficient may have been divided by ranks or micro-steps beforehand."""
    if 1 in held:
        return False
    return any(n in held or is_close(value * n, 1.0) for n in counts)


def _is_whole(aux: AuxTerm, literals: Iterable[float], counts: Iterable[int]) -> bool:
    """Say whether a coefficient is one that the program names, and no part of one."""
    value = _coefficient(aux)
    named = {n for n in (1, *counts) if any(is_close(value * n, each) for each in literals)}
    named.update(aux.named)
    return value == 1 or (1 in named and named.isdisjoint(counts))


def _has_outer(aux: AuxTerm, number: float) -> bool:
    return any(f.op == "*" and f.value == number for f in aux.factors[: aux.num_outer])


def _is_main_divided(window: LossWindow) -> bool:
    """Say whether the rest of the loss is divided for all passes before they are added up."""
    if window.num_passes < 2:
        return False
    by_rank: dict[int, list[float]] = {}
    for rank, each in window.passes():
        if each.num_counted:
            outer = each.factors[: each.aux[0].num_outer]
            by_rank.setdefault(rank, []).append(each.mass / _product(outer))
    masses = [mass for each in by_rank.values() for mass in each]
    if all(is_close(mass, 1.0) for mass in masses):
        return False
    sums = [sum(each) for each in by_rank.values()]
    whole = sum(sums)
    is_of_ranks = all(is_close(each, 1.0) for each in sums)
    return is_of_ranks or is_close(whole, 1.0) or is_close(whole, window.divisor)
