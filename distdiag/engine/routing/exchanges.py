"""Puts exchanges of tokens side by side: the ranks of one, and both ways of one rank."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.events.base import Event
from distdiag.events.collectives import Collective
from distdiag.events.lifecycle import ProbeDisabled, StepEnd
from distdiag.events.ranks import RankSet
from distdiag.events.routing import TokensExchanged
from distdiag.views.base import View
from distdiag.views.invariants import uneven_transfers
from distdiag.views.routing import Exchange, RoundTrip, UnfitExchange, width

_MOST_KEPT: Final = 256
_MOST_CALLS: Final = 8
_PAIR: Final = 2

Key = tuple[object, ...]
_NONE: Final = NothingThere("experts", "no all-to-all of tokens by a layer that routes was seen")


class ExchangeAligner(Aligner):
    """Shows an all-to-all as soon as its records contradict one another, before it has ended."""

    needs = (Collective, TokensExchanged, StepEnd, ProbeDisabled)
    builds = (UnfitExchange, RoundTrip)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._calls: dict[int, deque[Collective]] = {
            rank: deque(maxlen=_MOST_CALLS) for rank in job.world
        }
        self._open: OrderedDict[Key, dict[int, Exchange]] = OrderedDict()
        self._passes: dict[int, dict[Key, list[Exchange]]] = {}
        self._blind: set[int] = set()
        self._num_seen = 0

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether none was seen."""
        if self._blind:
            why = f"the routing of {RankSet(self._blind).phrase()} is not observed wholly"
            return dict.fromkeys(self.builds, NotObserved(why))
        return {} if self._num_seen else dict.fromkeys(self.builds, _NONE)

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        match event:
            case Collective():
                if event.signature.op.startswith("all_to_all"):
                    self._calls[event.rank].append(event)
            case TokensExchanged():
                yield from self._exchange(event)
            case StepEnd():
                yield from self._end_step(event.rank)
            case ProbeDisabled(probe="routing" | "collectives"):
                self._blind.add(event.rank)

    def end(self) -> Iterator[View]:
        """Show the passes that no step has ended."""
        for rank in tuple(self._passes):
            yield from self._end_step(rank)

    def _exchange(self, event: TokensExchanged) -> Iterator[View]:
        call = next((c for c in self._calls[event.rank] if c.seq == event.call), None)
        if call is None:
            return
        self._num_seen += 1
        exchange = Exchange(event, call)
        yield from self._compare(exchange)
        place: Key = (event.model, event.layer, event.ordinal, event.is_recompute)
        self._passes.setdefault(event.rank, {}).setdefault(place, []).append(exchange)

    def _compare(self, exchange: Exchange) -> Iterator[View]:
        call = exchange.call
        key: Key = (call.group, call.collective_seq_id)
        by_rank = self._open.setdefault(key, {})
        by_rank[call.rank] = exchange
        ops = {part.call.signature.op for part in by_rank.values()}
        if len(ops) == 1 and uneven_transfers({r: part.call for r, part in by_rank.items()}):
            yield UnfitExchange(dict(sorted(by_rank.items())))
        if len(by_rank) == len(call.group.ranks):
            del self._open[key]
        while len(self._open) > _MOST_KEPT:
            self._open.popitem(last=False)

    def _end_step(self, rank: int) -> Iterator[View]:
        for exchanges in self._passes.pop(rank, {}).values():
            trip = _round_trip(exchanges)
            if trip is not None and not trip.is_closed:
                yield trip


def _round_trip(exchanges: list[Exchange]) -> RoundTrip | None:
    """Return the two exchanges of hidden states, if there are exactly two, one there and one back.

    Counts, indices and scores go beside them, and have rows of another width or type.
    """
    kinds: dict[Key, list[Exchange]] = {}
    for exchange in exchanges:
        call = exchange.call
        if width(call.signature) > 1 and all("float" in d for d in call.signature.dtypes):
            kind: Key = (call.group, width(call.signature), call.signature.dtypes)
            kinds.setdefault(kind, []).append(exchange)
    pairs = [found for found in kinds.values() if len(found) == _PAIR]
    if len(pairs) != 1 or len(kinds) != 1:
        return None
    there, back = pairs[0]
    is_same_way = (there.rows_out, there.rows_in) == (back.rows_out, back.rows_in)
    return None if is_same_way else RoundTrip(there, back)
