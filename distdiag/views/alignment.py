"""The same moment of training as each rank saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Literal, TypeVar

from distdiag.events.base import Event
from distdiag.events.ranks import RankSet
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
class Alignment(Generic[E]):
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
