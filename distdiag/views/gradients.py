"""A view of gradients over ranks: what the ranks gave, and what their optimizers found."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median
from typing import Final, NamedTuple

from distdiag.events.base import CallSite
from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.events.models import TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

Ranks = tuple[int, ...]


class Sum(Enum):
    """What ranks do with the gradient of a parameter that all of them hold."""

    SUMMED = auto()  # it differs after the backward pass, or is sent round, and then is the same
    OWN = auto()  # no two of them apply the same, and nothing tells who holds copies
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class GradientSample:
    """One step of a model, on all ranks that train it.

    `exchanges` are, for each rank and each of its nodes, the ranks that it issued an all-to-all
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
class GradientView(View):
    """All samples of the gradients of one model so far.

    `placed` are the parameters of which something tells who holds copies, or that nobody does.
    """

    model: str
    ranks: RankSet
    samples: tuple[GradientSample, ...]
    placed: frozenset[str] = frozenset()

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.model


@dataclass(frozen=True, slots=True)
class SumsView(View):
    """What some ranks do with the gradients of one model, over several samples.

    `plans` are those of parameters that began alike and that all of these ranks train by the same
    optimizers; `sums` tells it for each sample in which there was a gradient. `drifted` are those
    whose copies differ in all later samples. `has_shards`: others of the model, but for experts,
    differ from the start. `is_more_sent`: a later step sent more between the ranks than these
    samples did. `is_one_task`: they divide one data set, and exchange no activations.
    """

    model: str
    ranks: Ranks
    plans: Mapping[str, TensorPlan]
    sums: Mapping[str, tuple[Sum, ...]]
    drifted: frozenset[str]
    step: int
    site: CallSite
    has_shards: bool = False
    is_more_sent: bool = False
    is_one_task: bool = False

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.model, self.ranks


@dataclass(frozen=True, slots=True)
class SameWorkView(View):
    """What the passes gave on ranks that are given the same and exchange activations.

    All of these parameters began alike. The gradients of `apart` differed between the ranks in all
    of `num_samples` samples, and so do the parameters since; those of `equal` did not at first.
    """

    model: str
    ranks: Ranks
    apart: tuple[str, ...]
    equal: tuple[str, ...]
    num_samples: int
    step: int
    site: CallSite

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.model, self.ranks


@dataclass(frozen=True, slots=True)
class StageScalings(View):
    """By what ranks multiply their gradients that send each other activations and their gradients.

    `factors` are those of each sampled step, by rank.
    """

    ranks: Ranks
    factors: Mapping[int, Mapping[int, float]]
    sites: Mapping[int, CallSite] = field(default_factory=dict)

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.ranks


# Over which ranks a gradient was combined, and by what its sum was divided: as measured.
#
# What the backward passes of the ranks gave is put beside what their optimizers found. A group is
# right if one divisor explains all parameters; it is not asked who has combined them, and how.

TOLERANCE: Final = 0.03
FEWEST: Final = 3
_WEAK: Final = 0.1
"""Sums that are so small a part of what was added up are mostly rounding."""


class Combined(NamedTuple):
    """A gradient is the sum of what `members` gave, divided by `divisor`.

    The divisor contains all that has scaled the gradients since, such as clipping.
    """

    members: Ranks
    divisor: float


def combined_on(
    samples: Sequence[GradientSample], rank: int, is_wanted: Callable[[str], bool] = lambda _: True
) -> Combined | None:
    """Return how the wanted gradients of a rank were combined; None if that is not clear.

    Several samples are taken together, as if nothing had scaled one of them otherwise.
    """
    everyone = set.intersection(*(set(sample.by_rank) for sample in samples))
    found = list(_explanations(samples, rank, is_wanted, everyone))
    return found[0] if len(found) == 1 else None


def copied_on(sample: GradientSample, rank: int) -> Combined | None:
    """Return how the gradients of a rank were combined, without ranks that have given copies.

    What ranks gave that compute the same explains the same sum, with a greater divisor.
    """
    found = list(_explanations((sample,), rank, lambda _: True, set(sample.by_rank)))
    if not found:
        return None
    least = min(found, key=lambda each: len(each.members))
    share = least.divisor / len(least.members)
    for each in found:
        is_same = abs(each.divisor / len(each.members) - share) <= TOLERANCE * share
        if not (set(least.members) <= set(each.members) and is_same):
            return None
    return least


def _explanations(
    samples: Sequence[GradientSample],
    rank: int,
    is_wanted: Callable[[str], bool],
    everyone: set[int],
) -> Iterator[Combined]:
    for members in candidates(samples[0], rank):
        values = [
            divisor
            for sample in samples
            if set(members) <= everyone
            for divisor in divisors(sample, rank, members, filter(is_wanted, sample.named(rank)))
        ]
        divisor = one_of(values)
        if divisor is not None:
            yield Combined(members, divisor)


def candidates(sample: GradientSample, rank: int) -> Iterator[Ranks]:
    """Yield the groups that may have combined gradients of a rank."""
    groups = {(rank,), tuple(sorted(sample.by_rank)), *sample.groups}
    yield from sorted(g for g in groups if rank in g and set(g) <= sample.by_rank.keys())


def divisors(
    sample: GradientSample, rank: int, members: Ranks, names: Iterable[str]
) -> Iterator[float]:
    """Yield, for each gradient that tells it, by what the sum over these ranks was divided."""
    for name in names:
        gradients = [sample.named(each).get(name) for each in members]
        there = [each for each in gradients if each is not None]
        if len(there) == len(members) and (own := sample.named(rank)[name]) in there:
            divisor = _divisor(members, own, there)
            if divisor is not None:
                yield divisor


def _divisor(members: Ranks, own: GradientSum, gradients: Sequence[GradientSum]) -> float | None:
    figures = [(each.given, each.norm, each.found) for each in gradients]
    if not all(math.isfinite(value) for each in figures for value in each):
        return None
    if any(each.has_left for each in gradients):
        return None
    given = sum(each.given for each in gradients)
    applied = own.found
    if own.members:
        if tuple(sorted(own.members)) != members or not own.num_copies:
            return None
        applied = sum(each.found for each in gradients) / own.num_copies
    if abs(given) < _WEAK * math.hypot(*(each.norm for each in gradients)):
        return None
    return given / applied if applied else math.inf


def one_of(values: Sequence[float], fewest: int = FEWEST) -> float | None:
    """Return the value that all have, but for rounding; None if there is none."""
    if len(values) < fewest:
        return None
    middle = median(values)
    if not math.isfinite(middle) or middle <= 0:
        return None
    is_one = all(abs(value - middle) <= TOLERANCE * middle for value in values)
    return middle if is_one else None
