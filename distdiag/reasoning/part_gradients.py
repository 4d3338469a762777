"""Parameters that work on parts of sequences, and whose gradients stay those of one part.

Where parts are gathered, the backward pass of the gather gives back one part of a gradient; where
they are scattered, it makes a whole of them. So the graph tells which parameters work on some of
the tokens only, with copies on other ranks for the rest, and which work on all, as shards do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from distdiag.gradient_event import GradientSum
from distdiag.gradient_view import GradientLook, GradientView, Ranks
from distdiag.reasoning.gradients import TOLERANCE, combined_on, divisors

FEWEST_LOOKS: Final = 2
_EQUAL: Final = 1e-9
_APART: Final = 1e-3
_NUMBER: Final = re.compile(r"(^|\.)\d+\.")


@dataclass(frozen=True, slots=True)
class PartGradients:
    """Parameters that these ranks hold copies of and apply gradients of their own part to.

    `num_shards` other parameters, which work on all tokens, were read beside them.
    """

    ranks: Ranks
    names: tuple[str, ...]
    num_shards: int
    step: int


class _Tokens(Enum):
    """On which tokens of a group what lies behind a passage works."""

    PART = auto()
    WHOLE = auto()
    UNKNOWN = auto()


_OTHER: Final = {_Tokens.PART: _Tokens.WHOLE, _Tokens.WHOLE: _Tokens.PART}


def part_gradients(view: GradientView) -> Iterator[PartGradients]:
    """Yield, for each group that gathers parts, what began alike and is never summed over it."""
    groups = {group for look in view.looks for found in look.gathers.values() for group in found}
    for group in sorted(group for group in groups if len(group) > 1):
        looks = [look for look in view.looks if set(group) <= look.by_rank.keys()]
        if len(looks) < FEWEST_LOOKS:
            continue
        regions = [_regions(looks[0], rank, group) for rank in group]
        parts, shards = (
            set.intersection(*(_named(each, tokens) for each in regions)) - view.placed
            for tokens in (_Tokens.PART, _Tokens.WHOLE)
        )
        names = [name for name in sorted(parts) if _are_copies(looks, group, name)]
        found = tuple(name for name in names if _are_own(looks, group, name, shards))
        if found:
            yield PartGradients(group, found, len(shards), looks[0].step)


# On which tokens a parameter works


def _regions(look: GradientLook, rank: int, group: Ranks) -> dict[str, set[_Tokens]]:
    """Return on which tokens each parameter works, by each way on which gradients reach it."""
    found: dict[str, set[_Tokens]] = {}
    for place, passage in enumerate(look.by_rank[rank].passages):
        if place and not _crosses(look, rank, place):
            continue  # those above it tell what lies behind it
        tokens = _behind(look, rank, group, place)
        reach = _reach(look, rank, place)
        beyond = {
            _behind(look, rank, group, below)
            for each in reach
            for below in look.by_rank[rank].passages[each].below
            if below not in reach
        }
        if place == 0 and len(beyond) == 1:
            tokens = _OTHER.get(beyond.pop(), _Tokens.UNKNOWN)
        elif tokens in beyond or not passage.is_bounded:
            tokens = _Tokens.UNKNOWN
        for name in (n for each in reach for n in look.by_rank[rank].passages[each].parameters):
            found.setdefault(name, set()).add(tokens)
    return found


def _named(regions: dict[str, set[_Tokens]], tokens: _Tokens) -> set[str]:
    return {name for name, found in regions.items() if found == {tokens}}


def _crosses(look: GradientLook, rank: int, place: int) -> bool:
    return bool(look.gathers[rank][place] or look.exchanges[rank][place])


def _behind(look: GradientLook, rank: int, group: Ranks, place: int) -> _Tokens:
    """Return on which tokens works what lies behind a passage, where it gathers or scatters."""
    passage = look.by_rank[rank].passages[place]
    given, passed = passage.given.num_elements, passage.passed.num_elements
    if look.gathers[rank][place] != group or not given or not passed:
        return _Tokens.UNKNOWN
    if given == passed * len(group):
        return _Tokens.PART
    return _Tokens.WHOLE if passed == given * len(group) else _Tokens.UNKNOWN


def _reach(look: GradientLook, rank: int, place: int) -> list[int]:
    """Return a passage and those behind it that send nothing to other ranks."""
    passages = look.by_rank[rank].passages
    reach = [place]
    for each in reach:  # it grows meanwhile
        below = [b for b in passages[each].below if not _crosses(look, rank, b)]
        reach += [b for b in below if b not in reach]
    return reach


# What is done with its gradient


def _are_copies(looks: Sequence[GradientLook], group: Ranks, name: str) -> bool:
    """Say whether a parameter of a layer was the same at first and is not any more.

    Tables of positions, and others outside of layers, may be split as the sequence is.
    """
    first, last = (_on(look, group, name) for look in (looks[0], looks[-1]))
    is_plain = not any(each.is_table or each.members for each in first)
    if not _NUMBER.search(name) or not first or not last or not is_plain:
        return False
    begun, ended = ([each.weight for each in found] for found in (first, last))
    most = max(map(abs, begun))
    is_alike = max(begun) - min(begun) <= _EQUAL * most
    return is_alike and max(ended) - min(ended) > _EQUAL * most


def _on(look: GradientLook, group: Ranks, name: str) -> list[GradientSum]:
    found = [look.named(rank).get(name) for rank in group]
    there = [each for each in found if each is not None]
    return there if len(there) == len(group) else []


def _are_own(looks: Sequence[GradientLook], group: Ranks, name: str, shards: set[str]) -> bool:
    """Say whether a gradient is treated as those of shards are, and differs between ranks."""
    told = [_is_own(look, group, name, shards) for look in looks]
    return told.count(True) >= FEWEST_LOOKS and False not in told


def _is_own(look: GradientLook, group: Ranks, name: str, shards: set[str]) -> bool | None:
    found = _on(look, group, name)
    if not found or not all(each.norm > 0 for each in found):
        return None
    for rank, own in zip(group, found, strict=True):
        combined = combined_on([look], rank, shards.__contains__)
        if combined is None or set(combined.members) & set(group) != {rank}:
            return None
        values = list(divisors(look, rank, combined.members, [name]))
        if combined.members == (rank,) and own.applied and not own.left:
            values = [own.given / own.applied]
        if not values:
            return None
        if abs(values[0] - combined.divisor) > TOLERANCE * combined.divisor:
            return False
    applied = [each.applied for each in found]
    return max(applied) - min(applied) > _APART * max(map(abs, applied))
