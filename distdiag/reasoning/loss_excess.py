"""Why the elements of a loss weigh more than 1 together: which ranks its factor counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distdiag.loss_event import LossPass
from distdiag.loss_view import LossWindow
from distdiag.reasoning.loss_weights import is_close, own_factors, total_weight


@dataclass(frozen=True, slots=True)
class Excess:
    """The elements of a loss weigh `times` as much as they should.

    `factor` is what the loss is multiplied by, 0 if it is not; `of` says which ranks it counts.
    """

    times: int
    factor: float
    of: str
    divisor: float
    is_sure: bool


def excess_of(window: LossWindow) -> Excess | None:
    """Return what multiplies the weights of one step, None if nothing is known to do so."""
    total, divisor = total_weight(window), window.divisor
    times = round(total)
    if times < 2 or not is_close(total, times) or not window.num_passes:
        return None
    groups, members = window.groups, tuple(window.by_rank)
    weights = {f.value for _, each in window.passes() for f in own_factors(each) if f.is_float}
    world = max(map(len, groups), default=0)
    for factor in _factors(window):
        mass = total * divisor / factor
        is_sure = factor not in weights
        # The sum over the ranks is divided by a count of all their elements: a factor can only be
        # meant to undo the division by the number of ranks.
        if is_close(mass, 1.0) and factor == world:
            return Excess(
                times, factor, "all ranks", divisor, is_sure=is_sure and not _is_own_mean(window)
            )
        parts = [group for group in groups if len(group) == factor]
        if is_close(mass / divisor, 1.0) and parts and len(members) > divisor:
            shared = _shared(window, parts, factor)
            what = "all ranks" if factor == world else _phrase(shared or parts)
            return Excess(times, factor, what, divisor, is_sure=is_sure and bool(shared))
    is_summed = len(members) > divisor and is_close(times * divisor, len(members))
    if is_summed and not _factors(window) and _is_own_mean(window):
        return Excess(times, 0.0, "", divisor, is_sure=False)
    return None


def _factors(window: LossWindow) -> list[float]:
    """Return the whole numbers by which all passes are multiplied."""
    found: list[set[float]] = [
        {f.value for f in own_factors(each) if f.op == "*" and f.value >= 2 and f.value % 1 == 0}
        for _, each in window.passes()
        if each.num_counted
    ]
    return sorted(set.intersection(*found)) if found else []


def _is_own_mean(window: LossWindow) -> bool:
    """Say whether any pass weighs its elements by their own number, whatever factors it has."""
    return any(_own_mass(each) for _, each in window.passes() if each.num_counted)


def _own_mass(each: LossPass) -> bool:
    mass = each.mass
    for factor in own_factors(each):
        mass = mass * factor.value if factor.op == "/" else mass / factor.value
    return is_close(mass, 1.0)


def _shared(
    window: LossWindow, groups: Iterable[tuple[int, ...]], factor: float
) -> list[tuple[int, ...]]:
    """Return the groups that share one mean each, of which every rank has a part; or none."""
    masses = {rank: sum(each.mass for each in window.of(rank)) / factor for rank in window.by_rank}
    if all(is_close(mass, 1.0) for mass in masses.values()):
        return []
    inside = [group for group in groups if set(group) <= masses.keys()]
    sharing = [g for g in inside if is_close(sum(masses[rank] for rank in g), 1.0)]
    is_whole = {rank for group in sharing for rank in group} == masses.keys()
    return sharing if is_whole else []


def _phrase(groups: Iterable[tuple[int, ...]]) -> str:
    first = min(groups)
    return "ranks in the group " + ", ".join(map(str, first))
