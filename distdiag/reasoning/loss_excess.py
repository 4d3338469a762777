"""Why the elements of a loss weigh more than 1 together: which ranks its factor counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distdiag.loss_event import LossPass
from distdiag.loss_view import LossWindow
from distdiag.reasoning.loss_weights import is_close, own_factors, total_weight
from distdiag.reasoning.sequences import members_of, num_local_tokens
from distdiag.sequence_view import SequenceView


@dataclass(frozen=True, slots=True)
class Excess:
    """The elements of a loss weigh `times` as much as they should.

    `factor` is what the loss is multiplied by, 0 if it is not; `of` says which ranks it counts.
    `sharing` are ranks that share a sequence, of which each has a loss over its own part.
    """

    times: int
    factor: float
    of: str
    divisor: float
    is_sure: bool
    sharing: tuple[int, ...] = ()


def excess_of(window: LossWindow, sequences: Sequence[SequenceView] = ()) -> Excess | None:
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
        own = _sharing(window, times, sequences) if factor == times else ()
        if own:
            return Excess(times, factor, _phrase([own]), divisor, is_sure=is_sure)
    is_summed = len(members) > divisor and is_close(times * divisor, len(members))
    if is_summed and not _factors(window) and _is_own_mean(window):
        sharing = _sharing(window, times, sequences)
        return Excess(times, 0.0, "", divisor, is_sure=bool(sharing), sharing=sharing)
    return None


def _sharing(window: LossWindow, size: int, sequences: Sequence[SequenceView]) -> tuple[int, ...]:
    """Return so many ranks that share a sequence, if all ranks do, each with its part of a mean.

    A rank that has the loss of the whole sequence may keep only a part of its gradient.
    """
    if any(not _is_mean_of_tokens(each) for _, each in window.passes()):
        return ()
    groups: set[tuple[int, ...]] = set()
    for view in sequences:
        for members in members_of(view):
            parts = {rank: num_local_tokens(view, rank, len(members)) for rank in members}
            if len(members) == size and all(_has_part(window, *part) for part in parts.items()):
                groups.add(tuple(sorted(members)))
    is_whole = sorted(rank for group in groups for rank in group) == sorted(window.by_rank)
    return min(groups) if is_whole else ()


def _is_mean_of_tokens(each: LossPass) -> bool:
    return each.kind in ("nll", "masked") and each.num_elements > 1 and _own_mass(each)


def _has_part(window: LossWindow, rank: int, num_tokens: int) -> bool:
    passes = window.of(rank) if rank in window.by_rank else ()
    return bool(passes) and all(
        num_tokens / 2 <= each.num_elements <= num_tokens for each in passes
    )


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
