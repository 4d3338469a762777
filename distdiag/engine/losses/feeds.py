"""What models are given beside what ranks exchange: who works on the same samples, or shares them.

Gradients alone do not tell whether ranks should have the same ones.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from distdiag.engine.relations import Exchanges, is_foreign
from distdiag.events.base import Event
from distdiag.events.collectives import Collective
from distdiag.events.data import EpochFed, ModelFed

_FEWEST_PASSES: Final = 2
_MOST_PASSES: Final = 8
_MOST_STEPS: Final = 16
_WAYS: Final = ("send", "recv")
_MOVING: Final = ("all_to_all", "all_gather", "reduce_scatter", *_WAYS)
_FIRST_STEPS: Final = 3
"""Later, what is gathered may be figures of an evaluation."""

Ranks = tuple[int, ...]


class _Part(NamedTuple):
    """The part of a data set that a sampler leaves to a rank."""

    stream: str
    num_parts: int
    part: int


class Feeds:
    """The first passes of each rank's models, its parts of data sets, and its messages."""

    def __init__(self) -> None:
        self._exchanges = Exchanges()
        self._exchanging: set[int] = set()
        self._moving: set[int] = set()
        self._inputs: dict[int, dict[tuple[str, int], tuple[str, ...]]] = {}
        self._parts: dict[int, _Part] = {}
        self._messages: dict[int, dict[tuple[int, int], set[tuple[int, ...]]]] = {}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self._exchanges.feed(event)
                self._feed_message(event)
                if event.step < _FIRST_STEPS and _moves_rows(event):
                    self._moving.add(event.rank)
            case ModelFed():
                if self._exchanges.are_inside(event):
                    self._exchanging.add(event.rank)
                passes = self._inputs.setdefault(event.rank, {})
                if len(passes) < _MOST_PASSES:
                    passes[event.place] = event.inputs
            case EpochFed() if event.num_backwards > 0:
                sampler = event.sampler
                if sampler.num_replicas is not None and sampler.replica is not None:
                    part = _Part(event.stream, sampler.num_replicas, sampler.replica)
                    self._parts.setdefault(event.rank, part)

    def _feed_message(self, call: Collective) -> None:
        peer, op = call.signature.peer, call.signature.op
        if peer is None or op not in _WAYS:
            return
        sizes = call.signature.input_sizes or call.signature.output_sizes
        ends = (call.rank, peer) if op == "send" else (peer, call.rank)
        messages = self._messages.setdefault(call.step, {})
        messages.setdefault(ends, set()).update(sizes)
        if len(self._messages) > _MOST_STEPS:
            del self._messages[max(self._messages)]

    def are_parts_of_one(self, ranks: Iterable[int]) -> bool:
        """Say whether ranks divide one data set, and exchange no activations: they have one task.

        Who exchanges activations may hold layers, tables or experts of the others.
        """
        listed = list(ranks)
        parts = [self._parts[rank] for rank in listed if rank in self._parts]
        is_one = len({part[:2] for part in parts}) == 1
        is_apart = len({part.part for part in parts}) == len(listed)
        return is_one and is_apart and not (self._exchanging | self._moving) & set(listed)

    def working_alike(self) -> list[Ranks]:
        """Return the ranks that are always given the same, and exchange activations."""
        groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for rank in sorted(self._exchanging):
            passes = self._inputs[rank]
            if len(passes) >= _FEWEST_PASSES and all(passes.values()):
                groups.setdefault(tuple(passes.values()), []).append(rank)
        return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]

    def stages(self, step: int) -> list[Ranks]:
        """Return the ranks that send tensors to and fro in a step, of the same sizes both ways.

        So do activations and their gradients.
        """
        messages: Mapping[tuple[int, int], set[tuple[int, ...]]] = self._messages.get(step, {})
        joined: dict[int, set[int]] = {}
        for (source, target), sizes in messages.items():
            if source < target and messages.get((target, source)) == sizes:
                group = joined.get(source, {source}) | joined.get(target, {target})
                joined |= dict.fromkeys(group, group)
        return sorted({tuple(sorted(group)) for group in joined.values()})


def _moves_rows(call: Collective) -> bool:
    """Say whether the program itself sends rows round, as for tables or experts of others."""
    rows = max((sizes[0] for sizes in call.signature.input_sizes if sizes), default=0)
    return call.signature.op.startswith(_MOVING) and rows > 1 and is_foreign(call.site)
