"""Which parameters lie behind the exchanges of a model, as one rank's graph tells.

A parameter that gradients reach behind one all-to-all, and not without, is that of an expert: the
tokens were sent there. Behind two of them it is on the side of the tokens again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from distdiag.gradient_event import Passage
from distdiag.gradient_view import GradientLook, Ranks

_ALIKE: Final = 0.01
"""So close the ratios of sums and of norms are where a gradient was only scaled."""


@dataclass(frozen=True, slots=True)
class ExpertPath:
    """An exchange, by its place among the passages of a rank, and the experts behind it."""

    place: int
    exchange: Ranks
    names: frozenset[str]


def expert_paths(look: GradientLook, rank: int) -> Iterator[ExpertPath]:
    """Yield the exchanges of a rank that have experts behind them, the last layer first."""
    passages, exchanges = look.by_rank[rank].passages, look.exchanges[rank]
    if not passages:
        return
    depths = _depths(passages, exchanges)
    least: dict[str, int] = {}
    for place, depth in depths.items():
        for name in passages[place].parameters:
            least[name] = min(depth, least.get(name, depth))
    for place, depth in depths.items():
        reach = _reach(passages, exchanges, place)
        if exchanges[place] and depth % 2 == 1 and reach is not None:
            names = {name for each in reach for name in passages[each].parameters}
            mine = frozenset(name for name in names if least[name] == depth)
            if mine:
                yield ExpertPath(place, exchanges[place], mine)


def _depths(passages: Sequence[Passage], exchanges: Sequence[Ranks]) -> dict[int, int]:
    """Return how many exchanges at least lie between the loss and what is behind each passage."""
    depths = {0: 0}
    level, depth = [0], 0
    while level:
        deeper = []
        for place in level:  # it grows meanwhile
            for below in passages[place].below:
                if below in depths:
                    continue
                if exchanges[below]:
                    deeper.append(below)
                else:
                    depths[below] = depth
                    level.append(below)
        depth += 1
        level = [place for place in dict.fromkeys(deeper) if place not in depths]
        depths |= dict.fromkeys(level, depth)
    return depths


def _reach(passages: Sequence[Passage], exchanges: Sequence[Ranks], place: int) -> list[int] | None:
    """Return a passage and all that follow it before the next exchange; None if unknown."""
    reach = [place]
    for each in reach:  # it grows meanwhile
        if not passages[each].is_bounded:
            return None
        reach += [b for b in passages[each].below if not exchanges[b] and b not in reach]
    return reach


def factor_of(look: GradientLook, rank: int, path: ExpertPath) -> float | None:
    """Return by what the backward pass of an exchange multiplies gradients; None if not clear.

    What a rank sends another one receives: over all ranks only a factor changes the norm.
    """
    mine = [each.place for each in expert_paths(look, rank) if each.exchange == path.exchange]
    index = mine.index(path.place)
    found: list[Passage] = []
    for other in path.exchange:
        if other not in look.by_rank:
            return None
        theirs = [e for e in expert_paths(look, other) if e.exchange == path.exchange]
        if len(theirs) != len(mine):
            return None
        found.append(look.by_rank[other].passages[theirs[index].place])
    given = math.hypot(*(each.given.norm for each in found))
    passed = math.hypot(*(each.passed.norm for each in found))
    is_whole = sum(e.given.num_elements - e.passed.num_elements for e in found) == 0
    return passed / given if is_whole and given > 0 and math.isfinite(passed) else None


def scales_of(look: GradientLook, rank: int) -> frozenset[float]:
    """Return by what other functions of the program multiply gradients as a whole."""
    found: set[float] = set()
    exchanges = look.exchanges[rank]
    for place, passage in enumerate(look.by_rank[rank].passages):
        given, passed = passage.given, passage.passed
        is_plain = given.num_elements == passed.num_elements > 0 and not exchanges[place]
        if not is_plain or not given.norm > 0 or given.total == 0:
            continue
        by_norm, by_sum = passed.norm / given.norm, passed.total / given.total
        is_scaled = abs(abs(by_sum) - by_norm) <= _ALIKE * by_norm
        if is_scaled and abs(by_norm - 1) > _ALIKE:
            found.add(round(by_norm, 3))
    return frozenset(found)
