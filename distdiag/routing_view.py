"""Views of routing over ranks and passes: the same choices of experts side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distdiag.ranks import RankSet
from distdiag.routing_event import AuxLoss, CounterWritten, Routing


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
class RoutingView:
    """What was seen so far of the routing in one model.

    `choices` are the choices of first forward passes, the last one of each rank, layer and number
    in each step that was looked at. `aux` are the looks at balancing losses that were never used,
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
