"""What ranks should share: the table of relations, and the views that its checks are shown.

A row of the table is an item that each rank has, a column an axis along which work is divided. A
comparison over ranks is a cell of it, so that no check has its own idea of who belongs together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from distdiag.events.base import CallSite
from distdiag.events.data import Draw, Fetch, GeneratorUse, ModelFed
from distdiag.events.ranks import RankSet
from distdiag.views.base import View


class Item(StrEnum):
    """What each rank has, and ranks can be compared by."""

    INPUT = "what the outermost model is given"
    MASK = "random numbers for activations in a forward pass"
    AUGMENTATION = "random numbers that are drawn to read or change samples"


class Axis(StrEnum):
    """How the work is divided among ranks."""

    DATA = "data-parallel"
    TENSOR = "tensor-parallel"
    SEQUENCE = "sequence-parallel"
    EXPERT = "expert-parallel"
    WORKER = "workers of one data loader"


class Relation(StrEnum):
    """How what one rank has is related to what the others have."""

    EQUAL = "the same on all of them"
    DIFFERENT = "different on each of them"
    PARTS = "parts of one whole"


@dataclass(frozen=True, slots=True)
class Allowance:
    """When ranks may be related in another way: `reason` ends ``it may be intended, since …``."""

    reason: str
    is_right: bool = False
    """Whether nothing is wrong then; else it is only not known."""


ONE_BATCH: Final = Allowance("one batch comes again and again, as to memorise it", is_right=True)
FEW_PASSES: Final = Allowance("too few batches were seen to rule out chance", is_right=True)
NO_ROWS: Final = Allowance("it is no batch of samples", is_right=True)
SHARED_WORK: Final = Allowance("they exchange activations or rewards, too")
IN_ORDER: Final = Allowance("they are read in the order of the data set, as in a smoke test")
DRAWN: Final = Allowance("the program draws them itself, as in a smoke test")
OWN_NOISE: Final = Allowance("each of them draws other numbers for it, as several tries at it")
SEEDED_BY_LIBRARY: Final = Allowance("a library seeds all ranks alike by itself")
PARTS_OF_BATCH: Final = Allowance("each takes its part of one batch", is_right=True)
NOT_LOADED: Final = Allowance("it is not known from which batches they come")
DIVIDED_LATER: Final = Allowance("they may be samples that are divided among the ranks later")
SEEDED_ALIKE: Final = Allowance("it follows from ranks that are seeded alike, as for the weights")
FEW_DRAWS: Final = Allowance("no more numbers than for whole batches are known to be drawn")
FIRST_FETCH: Final = Allowance("it was with the first fetch alone, which may prepare the data set")


@dataclass(frozen=True, slots=True)
class Cell:
    """What ranks along an axis should share of an item, why, and the exceptions that are known."""

    relation: Relation
    reason: str
    exceptions: frozenset[Allowance] = frozenset()


TABLE: Final[Mapping[tuple[Item, Axis], Cell]] = {
    (Item.INPUT, Axis.DATA): Cell(
        Relation.DIFFERENT,
        "the average of equal gradients is one of them, so the other ranks add nothing",
        frozenset({ONE_BATCH, FEW_PASSES, NO_ROWS, SHARED_WORK, IN_ORDER, DRAWN, OWN_NOISE}),
    ),
    (Item.INPUT, Axis.TENSOR): Cell(
        Relation.EQUAL,
        "each rank computes its share of one result, and shares of different batches are summed up",
        frozenset({PARTS_OF_BATCH, NOT_LOADED}),
    ),
    (Item.INPUT, Axis.SEQUENCE): Cell(
        Relation.PARTS, "each rank has its piece of every sequence of one batch"
    ),
    (Item.INPUT, Axis.EXPERT): Cell(
        Relation.DIFFERENT, "ranks that exchange tokens are data-parallel for all other layers"
    ),
    (Item.MASK, Axis.DATA): Cell(
        Relation.DIFFERENT,
        "a step averages over as many masks as samples only if each sample has one of its own",
        frozenset({SHARED_WORK, SEEDED_BY_LIBRARY, DIVIDED_LATER}),
    ),
    (Item.MASK, Axis.SEQUENCE): Cell(
        Relation.DIFFERENT, "the parts of a sequence would have one mask, again and again"
    ),
    (Item.MASK, Axis.TENSOR): Cell(
        Relation.EQUAL, "ranks that hold the same activations would go on with different ones"
    ),
    (Item.MASK, Axis.EXPERT): Cell(
        Relation.DIFFERENT, "ranks that exchange tokens are data-parallel for all other layers"
    ),
    (Item.AUGMENTATION, Axis.DATA): Cell(
        Relation.DIFFERENT,
        "a step averages over as many augmentations as samples only if each has one of its own",
        frozenset({SEEDED_ALIKE, FEW_DRAWS, FIRST_FETCH}),
    ),
    (Item.AUGMENTATION, Axis.WORKER): Cell(
        Relation.DIFFERENT,
        "samples that are read at the same time would all be changed in the same way",
        frozenset({FEW_DRAWS, FIRST_FETCH}),
    ),
}


def doubt_of(exceptions: Iterable[Allowance]) -> str:
    """Say why something may be intended, as the end of a message; nothing if nothing says so."""
    reasons = " and ".join(each.reason for each in exceptions if not each.is_right)
    return f"; it may be intended, since {reasons}" if reasons else ""


@dataclass(frozen=True, slots=True)
class RelationView(View):
    """An item side by side over ranks along an axis, for several backward passes of a model.

    `known_by` says how the axis is known. `exceptions` are those of the cell that hold here.
    """

    item: Item
    axis: Axis
    known_by: str
    model: str
    ranks: RankSet
    passes: tuple[Mapping[int, ModelFed], ...]
    exceptions: tuple[Allowance, ...] = ()

    @property
    def supersedes(self) -> Hashable:
        """More passes replace fewer."""
        return (type(self), self.item, self.model, self.ranks)

    @property
    def cell(self) -> Cell:
        """What the table says of the item."""
        return TABLE[self.item, self.axis]

    @property
    def is_right(self) -> bool:
        """Whether an exception says that nothing is wrong."""
        return any(each.is_right for each in self.exceptions)

    @property
    def doubt(self) -> str:
        """Why it may be intended, as the end of a message; empty if nothing says so."""
        return doubt_of(self.exceptions)


class SampledInputs(RelationView):
    """What a model is given, where a loader has fetched it by indices."""

    __slots__ = ()


class OtherInputs(RelationView):
    """What a model is given, where indices are not known: streams, and what scripts make."""

    __slots__ = ()


class ReplicatedInputs(RelationView):
    """What ranks are given that hold shards of one model, and compute one result together."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class MaskView(RelationView):
    """Random numbers that are drawn in forward passes.

    `draws` are for each pass those that belong together, by rank.
    """

    draws: tuple[Mapping[int, Draw], ...] = ()


@dataclass(frozen=True, slots=True)
class AugmentationView(View):
    """A generator from which different samples got the same numbers, in `use` and other fetches.

    Each of `fetches` has those that began and ended in one state, by rank, or by worker if it is
    about the workers of one rank. They read samples of `stream` that a model is trained on.
    """

    axis: Axis
    stream: str
    ranks: RankSet
    fetches: tuple[Mapping[int, Fetch], ...]
    use: GeneratorUse
    site: CallSite
    step: int | None
    exceptions: tuple[Allowance, ...] = ()

    @property
    def supersedes(self) -> Hashable:
        """What was said of the same generator."""
        return (type(self), self.axis, self.stream, self.ranks, self.use.name)

    @property
    def cell(self) -> Cell:
        """What the table says of the item."""
        return TABLE[Item.AUGMENTATION, self.axis]

    @property
    def doubt(self) -> str:
        """Why it may be intended, as the end of a message; empty if nothing says so."""
        return doubt_of(self.exceptions)


def equal_ranks(values: Mapping[int, Hashable]) -> RankSet:
    """Return the ranks that have the same as another one."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return RankSet(rank for group in groups.values() if len(group) > 1 for rank in group)


def are_different(values: Iterable[Hashable]) -> bool:
    """Say whether there are several, and no two are the same."""
    listed = list(values)
    return 1 < len(listed) == len(set(listed))


@dataclass(frozen=True, slots=True)
class NormalisedFeeds(View):
    """What ranks were given whose model normalises by the statistics of one rank's batch.

    `is_shared_work`: some ranks exchange more than gradients and parameters.
    """

    model: str
    ranks: RankSet
    passes: tuple[Mapping[int, ModelFed], ...]
    is_shared_work: bool
