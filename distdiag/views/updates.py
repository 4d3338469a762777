"""Views of the steps of optimizers: what they changed, in which types, and what they skipped."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final, Generic, TypeVar

from distdiag.config.numerics import NumericsConfig
from distdiag.events.base import Event
from distdiag.events.ranks import RankSet
from distdiag.events.updates import (
    CastsReused,
    OptimizerUpdate,
    PositionsRounded,
    ReducedInType,
    ScalerStep,
    TensorUpdate,
)
from distdiag.views.base import View

E = TypeVar("E", bound=Event)

Looks = tuple[OptimizerUpdate, ...]
"""Steps of one optimizer on one rank, in their order."""

_LOST_SHARE: Final = 0.99
NUM_LOOKS: Final = 3
"""What is so at so many looked-at steps in a row is no accident of one batch."""


@dataclass(frozen=True, slots=True)
class UpdateView(View):
    """The steps of one optimizer that were looked at, on all ranks that have it."""

    is_of_one_rank: ClassVar[bool] = True
    by_rank: Mapping[int, Looks]
    numerics: NumericsConfig

    @property
    def any_look(self) -> OptimizerUpdate:
        """The newest step of the lowest rank."""
        return self.by_rank[min(self.by_rank)][-1]

    @property
    def title(self) -> str:
        """What the optimizer is called."""
        look = self.any_look
        return f"{look.optimizer} of {look.model}" if look.model else look.optimizer

    @property
    def ranks(self) -> RankSet:
        """Who has it."""
        return RankSet(self.by_rank)

    @property
    def supersedes(self) -> Hashable:
        """What was said when fewer steps had been looked at."""
        return ("updates", self.any_look.optimizer, self.any_look.model)


def settled(looks: Looks) -> Looks:
    """Return the last few steps at which the learning rate neither rose nor was low on purpose.

    A warm-up rises, and a schedule that comes to its end is low: both make updates that are small.
    """
    full = max((look.full_rate for look in looks), default=0.0)
    found = [
        now
        for before, now in pairwise(looks)
        if 0 < now.rate <= before.rate and now.rate >= full / 2
    ]
    return tuple(found[-NUM_LOOKS:])


def lost_in(looks: Looks) -> dict[str, TensorUpdate]:
    """Return the parameters that settled steps in a row have left as they were, with the last one.

    Those are left out of which another copy keeps the precision.
    """
    if len(looks) < NUM_LOOKS or any(look.keeps_copies for look in looks):
        return {}
    rows = [{each.name: each for each in look.tensors if _is_lost(each)} for look in looks]
    names = set.intersection(*map(set, rows))
    return {name: each for name, each in rows[-1].items() if name in names}


def _is_lost(one: TensorUpdate) -> bool:
    least = _LOST_SHARE * one.num_sampled
    is_still = one.num_unchanged >= least and one.num_moved <= one.num_sampled - least
    has_rate = one.learning_rate > 0 and not one.keeps_precision
    return one.num_sampled > 0 and is_still and has_rate


@dataclass(frozen=True, slots=True)
class SeenView(View, Generic[E]):
    """What ranks have seen of one thing, when all of them have, or at the end."""

    is_of_one_rank: ClassVar[bool] = True
    by_rank: Mapping[int, E]

    @property
    def any_event(self) -> E:
        """What the lowest rank has seen."""
        return self.by_rank[min(self.by_rank)]

    @property
    def ranks(self) -> RankSet:
        """Who has seen it."""
        return RankSet(self.by_rank)


class ReductionView(SeenView[ReducedInType]):
    """A gradient that is summed over an axis of a mesh in a narrower type than it should."""

    __slots__ = ()


class PositionsView(SeenView[PositionsRounded]):
    """A buffer of positions that a cast has rounded."""

    __slots__ = ()


class CastsView(SeenView[CastsReused]):
    """A step between two passes of one autocast region."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ScalerView(View):
    """One call of a gradient scaler on ranks that do not agree on it.

    `are_together`: they are known to train one model; else they are all that there are.
    """

    by_rank: Mapping[int, ScalerStep]
    are_together: bool

    def skipping(self) -> Iterator[ScalerStep]:
        """Yield what the ranks say that skip."""
        return (step for step in self.by_rank.values() if step.is_skipped)


@dataclass(frozen=True, slots=True)
class SkippingView(View):
    """The last calls of a scaler on each rank, when one of them has skipped."""

    is_of_one_rank: ClassVar[bool] = True
    by_rank: Mapping[int, ScalerStep]

    @property
    def supersedes(self) -> Hashable:
        """What was said of fewer steps."""
        return ("skipping", next(iter(self.by_rank.values())).scaler)
