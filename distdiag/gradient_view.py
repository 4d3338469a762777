"""A view of gradients over ranks: what the ranks gave, and what their optimizers found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from distdiag.event import CallSite
from distdiag.gradient_event import GradientSum, GradientSums
from distdiag.model_event import TensorPlan
from distdiag.ranks import RankSet

Ranks = tuple[int, ...]


class Sum(Enum):
    """What ranks do with the gradient of a parameter that all of them hold."""

    SUMMED = auto()  # it differs after the backward pass, or is sent round, and then is the same
    OWN = auto()  # no two of them apply the same, and nothing tells who holds copies
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class GradientLook:
    """One step of a model, on all ranks that train it.

    `exchanges` are, for each rank and each of its passages, the ranks that it issued an all-to-all
    over; empty: it issued none. `gathers` are the same for gathers and reductions. `groups` are
    those over which anybody has reduced anything.
    """

    step: int
    by_rank: Mapping[int, GradientSums]
    exchanges: Mapping[int, tuple[Ranks, ...]]
    groups: frozenset[Ranks]
    gathers: Mapping[int, tuple[Ranks, ...]] = field(default_factory=dict)

    def named(self, rank: int) -> Mapping[str, GradientSum]:
        """Return the gradients of a rank by the names of their parameters."""
        return {each.name: each for each in self.by_rank[rank].gradients}


@dataclass(frozen=True, slots=True)
class GradientView:
    """All looks at the gradients of one model so far.

    `placed` are the parameters of which something tells who holds copies, or that nobody does.
    """

    model: str
    ranks: RankSet
    looks: tuple[GradientLook, ...]
    placed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SumsView:
    """What some ranks do with the gradients of one model, over several looks.

    `plans` are those of parameters that began alike and that all of these ranks train by the same
    optimizers; `sums` tells it for each look at which there was a gradient. `apart` are those whose
    copies differ at all later looks. `has_shards`: others of the model, but for experts, differ
    from the start. `is_more_sent`: a later step sent more between the ranks than these looks did.
    """

    model: str
    ranks: Ranks
    plans: Mapping[str, TensorPlan]
    sums: Mapping[str, tuple[Sum, ...]]
    apart: frozenset[str]
    step: int
    site: CallSite
    has_shards: bool = False
    is_more_sent: bool = False
