"""Align the calls that create process groups: all ranks of a scope must make them in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from distdiag.alignment import Alignment
from distdiag.event import GroupCreated
from distdiag.ranks import RankSet

GroupAlignment = Alignment[GroupCreated]
_Scope = tuple[tuple[int, ...], int]


class GroupCalls:
    """The group-creating calls that not all ranks of their scope have made yet."""

    def __init__(self, world: RankSet) -> None:
        """Start with none; only the ranks of `world` are observed."""
        self._world = world
        self._counts: Counter[tuple[int, _Scope]] = Counter()
        self._open: dict[tuple[_Scope, int], dict[int, GroupCreated]] = {}
        self._broken: set[_Scope] = set()

    def leave_out(self, rank: int) -> None:
        """Expect nothing of a rank: it runs, and is not observed."""
        self._world = RankSet(set(self._world) - {rank})

    def add(self, call: GroupCreated) -> GroupAlignment | None:
        """Take in one call; return the alignment if it completes one that the ranks disagree on."""
        if call.done or call.api.startswith("destroy"):
            return None
        scope = (call.scope, call.generation)
        # Destroying is not done by all, so the calls are numbered here, without it.
        ordinal = self._counts[call.rank, scope]
        self._counts[call.rank, scope] += 1
        by_rank = self._open.setdefault((scope, ordinal), {})
        by_rank[call.rank] = call
        if len(by_rank) < len(self._observed(scope)):
            return None
        del self._open[scope, ordinal]
        alike = {(other.ranks, other.desc) for other in by_rank.values()}
        if len(alike) == 1 or scope in self._broken:
            return None
        if len({other.ranks for other in by_rank.values()}) > 1:
            # From here on the ranks' calls are paired wrongly: the rest would be consequences.
            self._broken.add(scope)
        return self._alignment(scope, ordinal, by_rank)

    @property
    def is_broken(self) -> bool:
        """Whether ranks created different groups by the same call."""
        return bool(self._broken)

    def unmatched(self) -> Iterator[GroupAlignment]:
        """Yield for each scope the first call that not all of its ranks have made."""
        seen = set(self._broken)
        for (scope, ordinal), by_rank in sorted(self._open.items(), key=lambda item: item[0][1]):
            if scope not in seen:
                seen.add(scope)
                yield self._alignment(scope, ordinal, by_rank)

    def _observed(self, scope: _Scope) -> RankSet:
        return RankSet(set(scope[0]) & set(self._world))

    def _alignment(
        self, scope: _Scope, ordinal: int, by_rank: dict[int, GroupCreated]
    ) -> GroupAlignment:
        return Alignment(
            kind="group",
            key=(ordinal,),
            by_rank=dict(sorted(by_rank.items())),
            expected_ranks=self._observed(scope),
        )
