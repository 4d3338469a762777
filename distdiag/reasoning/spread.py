"""How far the means of the same layer lie apart on several ranks, and what chance would explain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Final

from distdiag.data_event import NormStatistics

_MUCH: Final = 0.5
_BEYOND: Final = 8.0


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of means over ranks, relative to the deviation of values and to chance.

    `num_free` values were left to tell the deviation by.
    """

    of_deviation: float
    of_chance: float
    num_free: int

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it matters, and independent values would hardly ever give it."""
        # With few values their own deviation is not well known.
        bound = _BEYOND * (1 + 8 / self.num_free)
        return self.of_deviation >= _MUCH and self.of_chance >= bound


def spread_over_ranks(
    passes: Sequence[Sequence[tuple[NormStatistics, ...]]], name: str
) -> Spread | None:
    """Compare the means of one layer on all ranks, over all passes and channels.

    None: not all ranks tell them in each pass, or there are too few values.
    """
    layers = [[_named(norms, name) for norms in by_rank] for by_rank in passes]
    told = [[each for each in by_rank if each is not None] for by_rank in layers]
    sizes = {len(each.means) for by_rank in told for each in by_rank}
    is_whole = all(len(t) == len(by_rank) > 1 for t, by_rank in zip(told, layers, strict=True))
    if not told or not is_whole or len(sizes) != 1:
        return None
    least = min(each.num_values for by_rank in told for each in by_rank)
    if least < 2:
        return None
    between = []
    for channel in range(sizes.pop()):
        own = fmean(
            each.variances[channel] * each.num_values / (each.num_values - 1)
            for by_rank in told
            for each in by_rank
        )
        if own > 0:
            apart = [variance(each.means[channel] for each in by_rank) for by_rank in told]
            between.append(fmean(apart) / own)
    if not between:
        return None
    ratio = fmean(between)
    num_free = sum(each.num_values - 1 for by_rank in told for each in by_rank)
    return Spread(math.sqrt(2 * ratio), ratio * least, num_free)


def _named(norms: tuple[NormStatistics, ...], name: str) -> NormStatistics | None:
    return next((each for each in norms if each.name == name), None)
