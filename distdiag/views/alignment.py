"""The same moment of training as each rank saw it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from distdiag.events.base import Event
from distdiag.events.checkpoints import (
    LoadWasted,
    ScheduleRestarted,
    StateRestored,
    StateSaved,
    TrainingResumed,
    WeightsLoaded,
)
from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.data import EpochFed, LoaderResumed, RowsGathered, ScheduleState
from distdiag.events.files import FileAccess
from distdiag.events.lifecycle import SteppedAlone
from distdiag.events.models import OptimizerState, SliceSaved
from distdiag.events.random import RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import TokenTrace
from distdiag.views.base import View
from distdiag.views.rank_states import RankState

E = TypeVar("E", bound=Event)

Kind = Literal[
    "collective", "message", "group", "test", "optimizer", "save", "load", "data", "random", "step"
]


class Trigger(StrEnum):
    """Why an incomplete alignment is shown to the checks now."""

    LEFT = "left"  # a missing rank finished, raised or died: it cannot come any more
    CYCLE = "cycle"  # the missing ranks wait, directly or not, for the ranks that are here
    STALLED = "stalled"  # nothing moved for the hang threshold
    ENDED = "ended"  # the run is over


@dataclass(frozen=True, slots=True)
class Alignment(View, Generic[E]):
    """The same moment of training as each rank saw it.

    `kind` is ``collective`` (key: group label, collective_seq_id), ``message`` (a send and the
    receive that should match it, key: group label, source, destination, tag, index), ``group``
    (a call that creates process groups, key: its ordinal), ``test`` (a path whose existence all
    ranks tested at one place of the program, key: path, index), ``optimizer`` (an optimizer that is
    about to step, key: optimizer, step), ``save`` (parts of sharded parameters that were saved,
    key: their names) or ``load`` (what became of a checkpoint, key: kind of event, …). `trigger` is
    None when all expected ranks are here. `parted` is the earlier point of the same group from
    which on the ranks' call sites have differed without meeting again, if there is one: the
    probable origin.
    """

    kind: Kind
    key: tuple[str | int, ...]
    by_rank: Mapping[int, E]
    expected_ranks: RankSet
    states: Mapping[int, RankState] = field(default_factory=dict)
    trigger: Trigger | None = None
    parted: Alignment[E] | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes two views the same moment, seen again."""
        return (self.kind, self.key, self.expected_ranks)

    @property
    def missing_ranks(self) -> RankSet:
        """Ranks that should have an event here and have none."""
        return RankSet(self.expected_ranks - self.by_rank.keys())

    @property
    def present_ranks(self) -> RankSet:
        """Ranks that have an event here."""
        return RankSet(self.by_rank)

    @property
    def any_event(self) -> E:
        """The event of the lowest rank that has one."""
        return self.by_rank[min(self.by_rank)]

    def show_as(
        self, kind: type[A], states: Mapping[int, RankState], trigger: Trigger | None = None
    ) -> A:
        """Return the view of this kind that shows the moment to the checks."""
        return kind(
            self.kind, self.key, self.by_rank, self.expected_ranks, states, trigger, self.parted
        )


A = TypeVar("A", bound=Alignment[Any])


class CollectiveView(Alignment[Collective]):
    """A collective, or a message, that all ranks have called, and not all alike."""

    __slots__ = ()


class OpenCollective(Alignment[Collective]):
    """A collective, or a message, that some ranks have called and others have not."""

    __slots__ = ()


class GroupView(Alignment[GroupCreated]):
    """A call that creates process groups, made by all ranks and not alike."""

    __slots__ = ()


class OpenGroup(Alignment[GroupCreated]):
    """A call that creates process groups, which some ranks have not made."""

    __slots__ = ()


class FileTestView(Alignment[FileAccess]):
    """A test at one place of the program whether a file exists, with differing answers."""

    __slots__ = ()


class OptimizerView(Alignment[OptimizerState]):
    """An optimizer that is about to step."""

    __slots__ = ()


class SliceSaveView(Alignment[SliceSaved]):
    """Parts of sharded parameters, which some ranks have saved and others have not."""

    __slots__ = ()


class WeightsLoadedView(Alignment[WeightsLoaded]):
    """Weights that were loaded into one model."""

    __slots__ = ()


class LoadWastedView(Alignment[LoadWasted]):
    """A load that came to nothing."""

    __slots__ = ()


class ResumeView(Alignment[TrainingResumed]):
    """A training that was resumed from a checkpoint."""

    __slots__ = ()


class RestartedScheduleView(Alignment[ScheduleRestarted]):
    """A schedule that begins anew in a training that was resumed."""

    __slots__ = ()


class RankStateView(Alignment[StateSaved | StateRestored]):
    """What ranks gave to, or got from, a distributed checkpoint under names that all share."""

    __slots__ = ()


class EpochView(Alignment[EpochFed]):
    """One pass over a data set."""

    __slots__ = ()


class ResumedLoaderView(Alignment[LoaderResumed]):
    """The first pass of a loader after it was given a state."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SampledEpochView(EpochView):
    """The same where samplers say what part of the data they yield, or of which epoch.

    `are_reduced`: the program itself reduces all gradients of its models over these ranks.
    """

    are_reduced: bool = False


class OwnListView(SampledEpochView):
    """The same where nothing divides the data set by indices, and samples were looked at."""

    __slots__ = ()


class GatheredRowsView(Alignment[RowsGathered]):
    """Rows of a last batch that were gathered."""

    __slots__ = ()


class ScheduleView(Alignment[ScheduleState]):
    """A learning-rate schedule, as far as it has come."""

    __slots__ = ()

    @property
    def supersedes(self) -> Hashable:
        """What was said when it had not come so far."""
        return ("schedule", self.any_event.name)


class RandomView(Alignment[RandomDraw | RandomState]):
    """Generators of random numbers at the same moment."""

    __slots__ = ()


class TokenTraceView(Alignment[TokenTrace]):
    """Numbered tokens that went through the split, the attention and the gather of a program."""

    __slots__ = ()


class LoneStepsView(Alignment[SteppedAlone]):
    """The ranks that train with nothing that connects them, though they were launched together."""

    __slots__ = ()

    @property
    def supersedes(self) -> tuple[str | int, ...]:
        """Fewer ranks may be alone later."""
        return self.key
