"""Views of numbers that are not finite, over ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from distdiag.events.lifecycle import Raised
from distdiag.events.numerics import NearOverflow, NonFinite, NonFinitePlace
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

_HELD = ("parameter", "buffer")
_COMBINED = ("gradient", "update")

Origin = tuple[int, str, str, str]
"""How early a place is among those of one step, then its stage, module and tensor."""


def first_place(event: NonFinite) -> NonFinitePlace:
    """Return where a step first met a number that is not finite.

    What a mask may hold stands for itself only where nothing worse came later.
    """
    first = event.places[0]
    if first.stage == "loss" and event.infinite:
        return event.infinite[0]
    return first


def origin_of(event: NonFinite) -> Origin:
    """Return the place of a rank's first number in a form that orders the ranks of one step.

    What a rank holds comes first, then what it makes itself, then what ranks have combined.
    """
    place = first_place(event)
    if place.stage in _HELD:
        return (0, place.stage, place.module, place.what)
    late = 10**6 if place.stage in _COMBINED else 1
    return (late + place.number, place.stage, place.module, place.what)


@dataclass(frozen=True, slots=True)
class NonFiniteView(View):
    """The first step at which numbers are not finite, and what each rank met in it.

    `is_harmful`: they reached the loss of a pass that was used, the gradients of an optimizer, or
    ended a rank. Without ranks it takes back what was said before.
    """

    is_of_one_rank: ClassVar[bool] = True

    step: int
    by_rank: Mapping[int, NonFinite]
    is_harmful: bool

    @property
    def supersedes(self) -> Hashable:
        """There is one first step of each kind."""
        return ("non-finite", self.is_harmful)

    @property
    def culprits(self) -> RankSet:
        """The ranks that met them first, all at the same place."""
        origins = {rank: origin_of(event) for rank, event in self.by_rank.items()}
        first = min(origins.values())
        return RankSet(rank for rank, origin in origins.items() if origin == first)


@dataclass(frozen=True, slots=True)
class MaskedView(View):
    """Numbers that were not finite while the loss and the gradients were, by rank.

    Each rank's last report stands for all: what hides them is known only some steps later.
    """

    is_of_one_rank: ClassVar[bool] = True

    by_rank: Mapping[int, NonFinite]

    @property
    def supersedes(self) -> Hashable:
        """A later report tells more."""
        return "masked-non-finite"


@dataclass(frozen=True, slots=True)
class LoneDecisionView(View):
    """Ranks that did something else than the others at a step whose numbers were not finite.

    `how` is what they did: they ``raised``, or went ``on`` without a backward pass or a step.
    """

    is_of_one_rank: ClassVar[bool] = True

    how: Literal["raised", "on"]
    by_rank: Mapping[int, NonFinite]
    raised: Mapping[int, Raised]
    others: RankSet

    @property
    def supersedes(self) -> Hashable:
        """Only the first decision counts."""
        return "lone-decision"


@dataclass(frozen=True, slots=True)
class NearOverflowView(View):
    """A module whose output comes near the largest number of its dtype, by rank."""

    is_of_one_rank: ClassVar[bool] = True

    by_rank: Mapping[int, NearOverflow]
