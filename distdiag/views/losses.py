"""A view of how much the elements of a loss weigh, over ranks and steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from distdiag.events.base import CallSite
from distdiag.events.losses import LossPass, LossWeights
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.sequences import SequenceView


@dataclass(frozen=True, slots=True)
class LossWindow:
    """The backward passes that led to one step, on all ranks whose gradients are combined."""

    step: int
    by_rank: Mapping[int, LossWeights]

    @property
    def num_passes(self) -> int:
        """How many passes each rank made, 0 if they made unlike numbers or one is not known."""
        numbers = {len(each.passes) for each in self.by_rank.values()}
        if len(numbers) != 1 or any(None in each.passes for each in self.by_rank.values()):
            return 0
        return numbers.pop()

    def passes(self) -> Iterator[tuple[int, LossPass]]:
        """Yield each pass with its rank."""
        for rank, event in self.by_rank.items():
            for each in event.passes:
                if each is not None:
                    yield rank, each

    def of(self, rank: int) -> tuple[LossPass, ...]:
        """Return the passes of one rank."""
        return tuple(each for each in self.by_rank[rank].passes if each is not None)

    def alone(self, rank: int) -> LossWindow:
        """Return the step as if this rank trained for itself."""
        own = msgspec.structs.replace(self.by_rank[rank], members=(rank,), divisor=1.0)
        return LossWindow(self.step, {rank: own})

    @property
    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by, 0 if that is not known."""
        divisors = {event.divisor for event in self.by_rank.values()}
        return divisors.pop() if len(divisors) == 1 else 0.0

    @property
    def groups(self) -> frozenset[tuple[int, ...]]:
        """The process groups that any of the ranks belongs to."""
        return frozenset(
            tuple(sorted(group)) for event in self.by_rank.values() for group in event.groups
        )


def has_aux(windows: Iterable[LossWindow]) -> bool:
    """Say whether an auxiliary (load-balancing) loss is part of a loss."""
    return any(each.aux for window in windows for _, each in window.passes())


@dataclass(frozen=True, slots=True)
class LossView(View):
    """All steps of one optimizer that were sampled so far.

    `has_wrapper`: a wrapper keeps the ranks together. `is_multiplied`: the program has multiplied
    gradients by more than one, between a backward pass and a step. `scalings` are all factors by
    which it has multiplied them. `sequences` is what ranks of the run exchange around attention.
    `is_measured`: no wrapper tells how gradients are combined, but the gradients themselves do.
    `resummed` are the steps before which the program added up, at `sum_site`, gradients over the
    ranks whose wrapper had averaged them, so that they became larger by the number of these ranks.
    """

    optimizer: str
    ranks: RankSet
    windows: tuple[LossWindow, ...]
    has_wrapper: bool = True
    is_multiplied: bool = False
    scalings: frozenset[float] = frozenset()
    sequences: tuple[SequenceView, ...] = ()
    is_measured: bool = False
    resummed: tuple[int, ...] = ()
    sum_site: CallSite | None = None

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.optimizer, self.ranks


class CombinedLossView(LossView):
    """The same where measured gradients tell how they were combined.

    It is shown, too, where a wrapper tells it and ranks share sequences.
    """

    __slots__ = ()


class AuxLossView(LossView):
    """The losses of an optimizer that auxiliary (load-balancing) losses are part of."""

    __slots__ = ()


class CombinedAuxLossView(CombinedLossView):
    """The same where measured gradients tell how they were combined."""

    __slots__ = ()
