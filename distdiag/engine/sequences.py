"""Finds the groups of ranks that share sequences, and what is known of their passes."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import MOST_FOLLOWED
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import Event
from distdiag.events.collectives import Collective
from distdiag.events.data import ModelFed
from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.events.lifecycle import EventsLost, ProbeDisabled
from distdiag.events.losses import LossWeights
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import (
    AttentionUnread,
    SequenceUnverified,
    SequenceUse,
    TokenTrace,
)
from distdiag.views.alignment import TokenTraceView
from distdiag.views.base import View
from distdiag.views.sequences import (
    Losses,
    MaskedSequences,
    ModelEquality,
    PositionedSequences,
    SequenceView,
    Uses,
)

# Compares the models of ranks, as they are when their training begins.

Tensors = Mapping[str, GradientSum]


class FirstSamples:
    """Keeps the first sample of the models of each rank."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, tuple[int, Tensors]]] = {}

    def feed(self, event: GradientSums) -> None:
        """Take in what one rank reports of one model."""
        known = self._known.setdefault(event.rank, {})
        if event.model not in known and len(known) < MOST_FOLLOWED:
            known[event.model] = event.step, {each.name: each for each in event.gradients}

    def equality(self, ranks: Sequence[int]) -> ModelEquality:
        """Compare the models of these ranks."""
        models = [self._known.get(rank, {}) for rank in ranks]
        if not all(models):
            return ModelEquality.UNKNOWN
        if len({_shape(each) for each in models}) > 1:
            return ModelEquality.OTHER_MODELS
        if len({step for each in models for step, _ in each.values()}) > 1:
            return ModelEquality.UNKNOWN
        first, *others = ([tensors for _, tensors in each.values()] for each in models)
        is_equal = all(_are_equal(first, other) for other in others)
        return ModelEquality.EQUAL if is_equal else ModelEquality.OTHER_VALUES


def _shape(models: Mapping[str, tuple[int, Tensors]]) -> frozenset[tuple[str, str, int]]:
    return frozenset(
        (model, tensor.name, tensor.num_elements)
        for model, (_, tensors) in models.items()
        for tensor in tensors.values()
    )


def _are_equal(models: Sequence[Tensors], others: Sequence[Tensors]) -> bool:
    """Say whether most of the elements are the same: a part of a model may be each rank's own."""
    num_elements, num_equal = 0, 0
    for one, other in zip(models, others, strict=True):
        for name, tensor in one.items():
            num_elements += tensor.num_elements
            is_sharded = tensor.members or name not in other  # each rank has another part
            if is_sharded or _is_close(tensor.weight, other[name].weight):
                num_equal += tensor.num_elements
    return 2 * num_equal >= num_elements


def _is_close(one: float, other: float) -> bool:
    # What could not be read is not known to differ.
    return not abs(one - other) > 1e-6 * max(abs(one), abs(other))


# What ranks saw of numbered tokens, put side by side for each group of ranks.

NOT_ASKED: Final = NothingThere(
    "numbered tokens",
    "no numbered tokens were sent: --verify-sequence does, or distdiag.sequence.verify",
)


class TokenTraceAligner(Aligner):
    """Numbered tokens, shown when all ranks of their group are there."""

    needs = (TokenTrace, SequenceUnverified)
    builds = (TokenTraceView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._events = SideBySide(job.world)
        self._seen: set[int] = set()
        self._is_shown = False
        self._unverified: dict[str, str] = {}

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether nothing was verified, or not what a library has."""
        if self._unverified:
            why = "; ".join(f"{name}: {reason}" for name, reason in self._unverified.items())
            return {TokenTraceView: NotObserved(why)}
        if self._is_shown:
            return {}
        if not self._seen:
            return {TokenTraceView: NOT_ASKED}
        ranks = RankSet(self._seen).phrase()
        return {TokenTraceView: NotObserved(f"only {ranks} reported what became of the tokens")}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        if isinstance(event, SequenceUnverified):
            self._unverified.setdefault(event.name, event.reason)
            return
        assert isinstance(event, TokenTrace)
        self._seen.add(event.rank)
        alignment = self._events.add(event)
        if alignment is not None:
            self._is_shown = True
            yield alignment.show_as(TokenTraceView, {})


# The aligner of forward passes that share sequences.

_NONE: Final = NothingThere(
    "shared sequences", "no exchange between ranks was seen around attention"
)
_NO_POSITIONS: Final = NothingThere(
    "shared sequences", "no positions of tokens were given to a module with shared attention"
)
_NO_MASKS: Final = NothingThere(
    "shared sequences",
    "no mask, causality or lengths that hide tokens were seen at shared attention",
)
_MOST_PASSES: Final = 8
_MOST_CALLS: Final = 256
_FLOATS: Final = ("float", "bfloat", "half", "double", "complex")
_NO_EXCHANGES: Final = ("barrier", "monitored_barrier")

_COMBINING: Final = ("all_reduce", "reduce", "broadcast", "all_gather", "allreduce")
_SHARING: Final = ("all_to_all", "all_gather")
_OBSERVING: Final = ("sequence", "collective-wrappers", "collectives", "functional-collectives")
"""The probes that see attention and what is exchanged around it."""
_COMPILED: Final = ("<eval_with_key>", "/_functorch/_aot_autograd/", "/_inductor/")
_FIGURES: Final = 32
"""A loss, norms and counts have no more elements than this."""
_COUNTS: Final = 8
"""Tokens, lengths and flags that ranks count together are no more; samples are."""
_FEWEST_STEPS: Final = 3

E = TypeVar("E", bound=Event)
Group = tuple[str, tuple[int, ...]]


class SequenceAligner(Aligner):
    """Ranks that share sequences, shown after each pass of all of them, and at the end."""

    needs = (
        SequenceUse,
        AttentionUnread,
        ModelFed,
        LossWeights,
        GradientSums,
        Collective,
        EventsLost,
        ProbeDisabled,
    )
    builds = (SequenceView, PositionedSequences, MaskedSequences)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._events = SideBySide(job.world)
        self._has_positions = False
        self._has_masks = False
        self._passes: dict[Group, deque[Uses]] = {}
        self._feeds: dict[int, deque[ModelFed]] = {}
        self._losses: dict[int, deque[LossWeights]] = {}
        self._calls: dict[int, deque[int]] = {}
        self._combined: set[frozenset[int]] = set()
        self._blind: set[int] = set()
        self._unread: dict[int, AttentionUnread] = {}
        self._compiled: set[int] = set()
        self._models = FirstSamples()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether no shared sequences were seen, or nothing beside them."""
        if self.job.only_start:
            return dict.fromkeys(self.builds, LIGHT)
        why = self._unseen()
        if why:
            return dict.fromkeys(self.builds, NotObserved(why))
        gaps: dict[type[View | Event], Gap] = {}
        if not self._passes:
            gaps |= dict.fromkeys(self.builds, _NONE)
        if not self._has_positions:
            gaps[PositionedSequences] = _NO_POSITIONS
        if not self._has_masks:
            gaps[MaskedSequences] = _NO_MASKS
        return gaps

    def _unseen(self) -> str:
        """Return why not all of attention was seen, or an empty string."""
        if self._blind:
            return f"the exchanges of {RankSet(self._blind).phrase()} are not observed wholly"
        if self._unread:
            number = sum(event.number for event in self._unread.values())
            ranks, first = RankSet(self._unread).phrase(), self._unread[min(self._unread)]
            return f"{number} calls of attention on {ranks} could not be read: {first.reason}"
        if self._compiled and not self._passes:
            ranks = RankSet(self._compiled).phrase()
            return f"{_NONE.reason}: {ranks} exchange in compiled code, where attention is not seen"
        return ""

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case SequenceUse():
                yield from self._feed_use(event)
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
            case EventsLost():
                self._blind.add(event.rank)
            case ProbeDisabled(probe=probe) if probe in _OBSERVING:
                self._blind.add(event.rank)

    def end(self) -> Iterator[View]:
        """Show all groups once more: what they were given may have become known since."""
        for group in self._passes:
            yield from self._views(group)

    def _feed_use(self, event: SequenceUse) -> Iterator[View]:
        self._has_positions |= any(use.positions for use in event.uses)
        self._has_masks |= any(use.mask or use.padding for use in event.uses)
        alignment = self._events.add(event)
        if alignment is not None:
            group = (event.how, event.members)
            known = self._passes.setdefault(group, deque(maxlen=_MOST_PASSES))
            known.append(alignment.by_rank)
            yield from self._views(group)

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

    def _views(self, group: Group) -> Iterator[View]:
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
            equality=self._models.equality(members),
        )
        yield view
        if self._has_positions:
            yield view.narrowed(PositionedSequences)
        if self._has_masks:
            yield view.narrowed(MaskedSequences)

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
    """Yield what all members have reported of the same place."""
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
