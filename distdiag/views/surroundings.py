"""What ranks run in, side by side."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from distdiag.events.environment import FactKind, NodeClock
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

Facts = Mapping[tuple[FactKind, str], str]


@dataclass(frozen=True, slots=True)
class SurroundingsView(View):
    """The facts of each rank that has told them."""

    by_rank: Mapping[int, Facts]

    @property
    def supersedes(self) -> Hashable:
        """Fewer ranks had told theirs."""
        return "surroundings"

    def differing(self, *kinds: FactKind) -> Iterator[tuple[str, Mapping[str, RankSet]]]:
        """Yield names of these kinds whose values differ, with the ranks of each value.

        A rank on which something is not set, or not imported, has the value ``""``.
        """
        names = {key: None for facts in self.by_rank.values() for key in facts if key[0] in kinds}
        for key in names:
            ranks: dict[str, list[int]] = {}
            for rank, facts in self.by_rank.items():
                ranks.setdefault(facts.get(key, ""), []).append(rank)
            if len(ranks) > 1:
                yield key[1], {value: RankSet(each) for value, each in ranks.items()}


@dataclass(frozen=True, slots=True)
class NodeClocksView(View):
    """The wall clocks of all nodes that have told theirs, by the lowest rank of each."""

    by_rank: Mapping[int, NodeClock]

    @property
    def supersedes(self) -> Hashable:
        """Fewer nodes had told theirs."""
        return "clocks"
