"""A view of gradients over ranks: what the ranks gave, and what their optimizers found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distdiag.gradient_event import GradientSum, GradientSums
from distdiag.ranks import RankSet

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GradientLook:
    """One step of a model, on all ranks that train it.

    `exchanges` are, for each rank and each of its passages, the ranks that it issued an all-to-all
    over; empty: it issued none. `groups` are those over which anybody has reduced anything.
    """

    step: int
    by_rank: Mapping[int, GradientSums]
    exchanges: Mapping[int, tuple[Ranks, ...]]
    groups: frozenset[Ranks]

    def named(self, rank: int) -> Mapping[str, GradientSum]:
        """Return the gradients of a rank by the names of their parameters."""
        return {each.name: each for each in self.by_rank[rank].gradients}


@dataclass(frozen=True, slots=True)
class GradientView:
    """All looks at the gradients of one model so far."""

    model: str
    ranks: RankSet
    looks: tuple[GradientLook, ...]
