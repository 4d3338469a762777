"""Vector clocks: how many events on files of each rank are known to be over.

Only events on files count, so ranks that touch none never change a clock, and ranks that know the
same share one object: most comparisons are comparisons of identities.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

# What keeps the replay of a rank from going on.


class Gate:
    """Something that ranks wait for in the replay; `waiters` are to be replayed when it changes."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[int] = []


# The clocks.

Clock = Mapping[int, int]
"""By rank, never changed once it is made; a rank that is not in it has 0."""

NOTHING: Final[Clock] = {}

_MOST_REMEMBERED: Final = 64


class Stamp(NamedTuple):
    """What a rank knows at one moment, and how many events it has had itself."""

    known: Clock
    rank: int
    num_events: int


class Joiner:
    """Puts together what several ranks know."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, int], tuple[Clock, Clock, Clock]] = {}

    def join(self, first: Clock, second: Clock) -> Clock:
        """Return what both know together: one of them, where it holds the other."""
        if first is second or not second:
            return first
        if not first:
            return second
        key = (id(first), id(second))
        remembered = self._results.get(key)
        if remembered is None:
            if len(self._results) >= _MOST_REMEMBERED:
                self._results.clear()
            # The clocks themselves are kept, so that their ids stay their own.
            remembered = self._results[key] = (first, second, _joined(first, second))
        return remembered[2]

    def meet(self, stamps: Iterable[Stamp]) -> Clock:
        """Return what somebody knows who has heard of all of these."""
        known: Clock = NOTHING
        news: dict[int, int] = {}
        for clock, rank, count in stamps:
            if clock is not known:
                known = self.join(known, clock)
            if count > clock.get(rank, 0):
                news[rank] = count
        news = {rank: count for rank, count in news.items() if count > known.get(rank, 0)}
        return {**known, **news} if news else known


def _joined(first: Clock, second: Clock) -> Clock:
    newer = {rank: count for rank, count in second.items() if count > first.get(rank, 0)}
    if not newer:
        return first
    if all(count <= second.get(rank, 0) for rank, count in first.items()):
        return second
    return {**first, **newer}
