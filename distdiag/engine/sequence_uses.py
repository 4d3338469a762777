"""Finds the groups of ranks that share sequences, and what is known of their passes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from distdiag.data_event import ModelFed
from distdiag.engine.judges import Judges
from distdiag.engine.likeness import FirstLooks
from distdiag.engine.side_by_side import SideBySide
from distdiag.engine.watch import Watch
from distdiag.event import Collective, Event, ProbeDisabled
from distdiag.gradient_event import GradientSums
from distdiag.loss_event import LossWeights
from distdiag.ranks import RankSet
from distdiag.sequence_use_event import AttentionUnread, SequenceUse
from distdiag.sequence_view import Losses, SequenceView, Uses

_MOST_PASSES: Final = 8
_MOST_CALLS: Final = 256
_FLOATS: Final = ("float", "bfloat", "half", "double", "complex")
_NO_EXCHANGES: Final = ("barrier", "monitored_barrier")

_COMBINING: Final = ("all_reduce", "reduce", "broadcast", "all_gather", "allreduce")
_SHARING: Final = ("all_to_all", "all_gather")
_OBSERVING: Final = ("sequence", "collective-fronts", "collectives", "functional-collectives")
"""The probes that see attention and what is exchanged around it."""
_COMPILED: Final = ("<eval_with_key>", "/_functorch/_aot_autograd/", "/_inductor/")
_FIGURES: Final = 32
"""A loss, norms and counts have no more elements than this."""
_COUNTS: Final = 8
"""Tokens, lengths and flags that ranks count together are no more; samples are."""
_FEWEST_STEPS: Final = 3

E = TypeVar("E", bound=Event)
Group = tuple[str, tuple[int, ...]]


class SequenceUses(Watch):
    """Feed events as they come; a group is judged after each pass of all its ranks."""

    kinds = (
        SequenceUse,
        AttentionUnread,
        ModelFed,
        LossWeights,
        GradientSums,
        Collective,
        ProbeDisabled,
    )

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Know of no group yet."""
        self._judges = judges
        self._events = SideBySide(world)
        self._passes: dict[Group, deque[Uses]] = {}
        self._feeds: dict[int, deque[ModelFed]] = {}
        self._losses: dict[int, deque[LossWeights]] = {}
        self._calls: dict[int, deque[int]] = {}
        self._combined: set[frozenset[int]] = set()
        self._blind: set[int] = set()
        self._unread: dict[int, AttentionUnread] = {}
        self._compiled: set[int] = set()
        self._models = FirstLooks()

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks of shared sequences, if none was seen, and why."""
        if self._blind:
            why = f"the exchanges of {RankSet(self._blind).phrase()} are not observed wholly"
        elif self._unread:
            number = sum(event.number for event in self._unread.values())
            ranks, first = RankSet(self._unread).phrase(), self._unread[min(self._unread)]
            why = f"{number} calls of attention on {ranks} could not be read: {first.reason}"
        elif not self._passes:
            why = "no exchange between ranks was seen around attention"
            if self._compiled:
                ranks = RankSet(self._compiled).phrase()
                why += f": {ranks} exchange in compiled code, where attention is not seen"
        else:
            return {}
        return {check.code: why for check in self._judges.needing(SequenceUse)}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case SequenceUse():
                self._feed_use(event)
            case ModelFed():
                _keep(self._feeds, event)
            case LossWeights():
                _keep(self._losses, event)
            case GradientSums():
                self._models.feed(event)
            case Collective():
                self._feed_call(event)
            case AttentionUnread():
                self._unread[event.rank] = event
            case ProbeDisabled(probe=probe) if probe in _OBSERVING:
                self._blind.add(event.rank)

    def finish(self) -> None:
        """Judge all groups once more: what they were given may have become known since."""
        for group in self._passes:
            self._judge(group)

    def _feed_use(self, event: SequenceUse) -> None:
        alignment = self._events.add(event)
        if alignment is not None:
            group = (event.how, event.members)
            known = self._passes.setdefault(group, deque(maxlen=_MOST_PASSES))
            known.append(alignment.by_rank)
            self._judge(group)

    def _feed_call(self, call: Collective) -> None:
        """Take note of calls that bring samples to others, or combine gradients."""
        op, dtypes = call.signature.op, call.signature.dtypes
        if call.step < _FEWEST_STEPS and op.startswith(_SHARING) and _is_compiled(call):
            self._compiled.add(call.rank)
        if call.step > 0 and op.startswith(_COMBINING) and _num_elements(call) > _FIGURES:
            self._combined.add(frozenset(call.group.ranks))
        sizes = (*call.signature.input_sizes, *call.signature.output_sizes)
        is_data = not sizes or max(map(math.prod, sizes)) > _COUNTS
        is_data = is_data and any(not dtype.startswith(_FLOATS) for dtype in dtypes)
        if is_data and not op.startswith(_NO_EXCHANGES) and len(call.group.ranks) > 1:
            self._calls.setdefault(call.rank, deque(maxlen=_MOST_CALLS)).append(call.seq)

    def _judge(self, group: Group) -> None:
        passes = tuple(self._passes[group])
        members = group[1]
        feeds = tuple(_together(self._feeds, members, lambda e: (e.model, e.number)))
        losses = tuple(_together(self._losses, members, lambda e: (e.optimizer, e.step)))
        view = SequenceView(
            how=passes[0][members[0]].how,
            ranks=RankSet(members),
            passes=passes,
            feeds=feeds,
            losses=losses,
            is_reduced=self._is_reduced(members, losses),
            is_fed_by_others=any(self._is_sent(fed) for each in feeds for fed in each.values()),
            likeness=self._models.likeness(members),
        )
        self._judges.judge_sequences(view)

    def _is_reduced(self, members: tuple[int, ...], losses: tuple[Losses, ...]) -> bool:
        steps = {event.step for each in losses for event in each.values()}
        if len(steps) < _FEWEST_STEPS or self._blind:
            return True
        return any(len(ranks & set(members)) > 1 for ranks in self._combined)

    def _is_sent(self, fed: ModelFed) -> bool:
        first = fed.since if fed.since >= 0 else 0
        return any(first <= seq < fed.begin for seq in self._calls.get(fed.rank, ()))


def _keep(known: dict[int, deque[E]], event: E) -> None:
    known.setdefault(event.rank, deque(maxlen=_MOST_PASSES)).append(event)


def _together(
    known: Mapping[int, Iterable[E]], members: tuple[int, ...], place: Callable[[E], object]
) -> Iterator[dict[int, E]]:
    """Yield what all members have told of the same place."""
    found: dict[object, dict[int, E]] = {}
    for rank in members:
        for event in known.get(rank, ()):
            found.setdefault(place(event), {})[rank] = event
    yield from (by_rank for by_rank in found.values() if len(by_rank) == len(members))


def _num_elements(call: Collective) -> int:
    return sum(math.prod(sizes) for sizes in call.signature.input_sizes)


def _is_compiled(call: Collective) -> bool:
    """Say whether code that a compiler made issues a call."""
    return any(part in frame.file for frame in call.site.frames for part in _COMPILED)
