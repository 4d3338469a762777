"""Sets of global ranks, and how they read to a person."""

from collections.abc import Iterable, Iterator, Set
from itertools import count, groupby


class RankSet(Set[int]):
    """An immutable set of global ranks that prints as ``0-3,7``."""

    __slots__ = ("_ranks",)

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._ranks = tuple(sorted(set(ranks)))

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __hash__(self) -> int:
        return hash(self._ranks)

    def __str__(self) -> str:
        counter = count()
        spans = [list(span) for _, span in groupby(self, key=lambda rank: rank - next(counter))]
        return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)

    def __repr__(self) -> str:
        return f"RankSet({list(self)})"

    def phrase(self) -> str:
        """Return ``rank 3`` or ``ranks 0-3,7``, for use in a sentence."""
        return f"rank {self}" if len(self) == 1 else f"ranks {self}"
