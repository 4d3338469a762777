"""Views of the exchanges of tokens between the ranks that share the experts of a layer."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod

from distdiag.events.collectives import Collective, Signature
from distdiag.events.ranks import RankSet
from distdiag.events.routing import AuxLoss, CounterWritten, Routing, TokensExchanged
from distdiag.views.base import View

# Views of routing over ranks and passes: the same choices of experts side by side.


@dataclass(frozen=True, slots=True)
class Rerouting:
    """A choice that a repeated forward pass made, and those of the first ones, none of them so."""

    repeated: Routing
    first: tuple[Routing, ...]

    @property
    def is_given_the_same(self) -> bool:
        """Whether the repeated pass was given what one of the first ones was given."""
        return bool(self.repeated.given) and self.repeated.given in {e.given for e in self.first}


@dataclass(frozen=True, slots=True)
class Divergence:
    """Choices of ranks whose layer was given the same tokens, not all of them the same."""

    by_rank: Mapping[int, Routing]

    @property
    def has_equal_scores(self) -> bool:
        """Whether even the scores are the same on all ranks."""
        scores = {event.scores for event in self.by_rank.values()}
        return len(scores) == 1 and "" not in scores

    @property
    def is_together(self) -> bool:
        """Whether it is known that the ranks train one model together."""
        ranks = set(self.by_rank)
        return all(ranks <= set(event.members) for event in self.by_rank.values())


@dataclass(frozen=True, slots=True)
class Recount:
    """A counter that a repeated pass has left otherwise than any of the first passes did."""

    repeated: CounterWritten
    first: tuple[CounterWritten, ...]


@dataclass(frozen=True, slots=True)
class RoutingView(View):
    """What was seen so far of the routing in one model.

    `choices` are the choices of first forward passes, the last one of each rank, layer and number
    in each step that was sampled. `aux` are the samples of auxiliary losses that were never used,
    and one at each that was. `num_steps` is how many steps a run took that ran to its end, else 0.
    """

    model: str
    ranks: RankSet
    reroutings: tuple[Rerouting, ...]
    num_repeated: int
    divergences: tuple[Divergence, ...]
    num_compared: int
    choices: tuple[Routing, ...]
    recounts: tuple[Recount, ...] = ()
    aux: tuple[AuxLoss, ...] = ()
    num_steps: int = 0

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was known."""
        return self.model


# The views of routing.


class RepeatedRouting(RoutingView):
    """The same where activation checkpointing repeats choices of experts."""

    __slots__ = ()


class AuxLossRouting(RoutingView):
    """The same where modules that route compute auxiliary (load-balancing) losses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part in an exchange: what the layer was doing, and the collective."""

    event: TokensExchanged
    call: Collective

    @property
    def rows_out(self) -> int:
        """How many rows the rank gives to all."""
        return rows(self.call.signature.input_sizes)

    @property
    def rows_in(self) -> int:
        """How many rows the rank gets from all."""
        return rows(self.call.signature.output_sizes)

    @property
    def even_share(self) -> int | None:
        """How many rows each rank of the group gets, None if not each of them gets as many."""
        shares = set(shares_of(self.call))
        return shares.pop() if len(shares) == 1 else None


@dataclass(frozen=True, slots=True)
class UnfitExchange(View):
    """An all-to-all of tokens in which what some rank sends is not what another one expects."""

    by_rank: Mapping[int, Exchange]

    @property
    def supersedes(self) -> Hashable:
        """What was said when fewer ranks had come."""
        call = self.any_exchange.call
        return call.group, call.collective_seq_id

    @property
    def ranks(self) -> RankSet:
        """The ranks whose part is known."""
        return RankSet(self.by_rank)

    @property
    def any_exchange(self) -> Exchange:
        """The part of the lowest rank."""
        return self.by_rank[min(self.by_rank)]

    @property
    def is_even(self) -> bool:
        """Whether each rank gives all others equally many rows, but not all ranks as many."""
        shares = {part.even_share for part in self.by_rank.values()}
        return len(shares) > 1 and None not in shares

    @property
    def calls(self) -> Mapping[int, Collective]:
        """The collective as each rank called it."""
        return {rank: part.call for rank, part in self.by_rank.items()}


@dataclass(frozen=True, slots=True)
class RoundTrip(View):
    """The two exchanges of a layer's forward pass: tokens go to their experts and come back."""

    there: Exchange
    back: Exchange

    @property
    def is_closed(self) -> bool:
        """Whether all that came is sent back, and all that was sent comes back."""
        return (self.there.rows_out, self.there.rows_in) == (self.back.rows_in, self.back.rows_out)


def rows(sizes: tuple[tuple[int, ...], ...]) -> int:
    """Return how many rows tensors of these sizes have together."""
    return sum(size[0] for size in sizes if size)


def shares_of(call: Collective) -> tuple[int, ...]:
    """Return how many rows each rank of the group gets, in group order; empty if not known."""
    signature, num_ranks = call.signature, len(call.group.ranks)
    if signature.op == "all_to_all":
        return tuple(size[0] for size in signature.input_sizes if size)
    if signature.input_splits:
        return signature.input_splits
    return (rows(signature.input_sizes) // num_ranks,) * num_ranks


def width(signature: Signature) -> int:
    """Return how many elements a row of what is sent has."""
    shown = signature.input_sizes or signature.output_sizes
    return prod(shown[0][1:]) if shown and shown[0] else 0
