"""Tables that stay small however long a run is.

What a table has forgotten is unknown, and never different: whoever asks for it gets nothing to
compare. It is counted in the `Forgotten` of the job, which the report tells of.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from distdiag.events.base import CallSite

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_FOLLOWED: Final = 64
"""So many models, optimizers, loaders, … are followed: a program that makes more of them makes
them anew again and again, and trains with the newest."""

_MOST_SITES: Final = 4096
_FILTER_BITS: Final = 1 << 22
"""Of 200,000 keys it then takes one in 100 that was never there for one of them."""


class Forgotten:
    """How much was forgotten of what, and out of how many things each time."""

    def __init__(self) -> None:
        self.has_gap = False
        """Events were lost: nobody knows what came first, or how often."""
        self._numbers: Counter[str] = Counter()
        self._kept: dict[str, int] = {}

    def add(self, what: str, kept: int) -> None:
        """Count one more; so many newer ones are kept."""
        self._numbers[what] += 1
        self._kept[what] = kept

    def reasons(self) -> dict[str, str]:
        """Return what was not looked at for this, and why, as a report says it."""
        return {
            f"older {what}": f"the newest {self._kept[what]:,} are kept, and {number:,} before "
            "them were forgotten: what came of those later was not compared"
            for what, number in sorted(self._numbers.items())
        }


class Recent(OrderedDict[K, V]):
    """The values of the keys that were used last: the one that was not for longest goes first."""

    def __init__(self, most: int, what: str = "", forgotten: Forgotten | None = None) -> None:
        """Keep so many; `forgotten` is told that of `what` something goes."""
        super().__init__()
        self.most = most
        self._what = what
        self._forgotten = forgotten

    def of(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made if there is none, as the one that was used last."""
        value = self.get(key)
        if value is None:
            value = self[key] = make()
            self.shrink()
        else:
            self.move_to_end(key)
        return value

    def shrink(self) -> None:
        """Forget the oldest of what is too much."""
        while len(self) > self.most:
            key, value = self.popitem(last=False)
            if self._forgotten is not None and self._what:
                self._forgotten.add(self._what, self.most)
            self.dropped(key, value)

    def dropped(self, key: K, value: V) -> None:
        """Take note of what was forgotten."""


class Filter:
    """Says of keys whether they may have been added, in a fixed room: sometimes of others, too."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, key: Hashable) -> None:
        """Remember a key."""
        if not self._bits:
            self._bits = bytearray(_FILTER_BITS // 8)
        for place in _places(key):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, key: Hashable) -> bool:
        bits = self._bits
        return bool(bits) and all(bits[p >> 3] & 1 << (p & 7) for p in _places(key))


def _places(key: Hashable) -> tuple[int, int]:
    number = hash((key, "")) & (1 << 62) - 1
    return number % _FILTER_BITS, (number // _FILTER_BITS) % _FILTER_BITS


class SinceFirst(Recent[K, V]):
    """Values that tell something only if they were kept since their keys first came."""

    def __init__(self, most: int, what: str = "", forgotten: Forgotten | None = None) -> None:
        super().__init__(most, what, forgotten)
        self._lost = Filter()

    def find(self, key: K, make: Callable[[], V]) -> V | None:
        """Return the value of a key, made if it comes for the first time; None: it is forgotten."""
        return None if self.has_lost(key) else self.of(key, make)

    def has_lost(self, key: K) -> bool:
        """Whether the value of a key may have been forgotten, or a part of it."""
        has_gap = self._forgotten is not None and self._forgotten.has_gap
        return has_gap or (key not in self and key in self._lost)

    def dropped(self, key: K, value: V) -> None:
        """Remember that it has come before."""
        self._lost.add(key)


class Turns(Recent[K, dict[int, int]]):
    """Numbers what each rank does again and again, so that the same times are compared."""

    def __init__(
        self, num_ranks: int, most: int, what: str = "", forgotten: Forgotten | None = None
    ) -> None:
        """Begin with nothing; what is forgotten is numbered anew if all ranks were as far."""
        super().__init__(most, what, forgotten)
        self._num_ranks = num_ranks
        self._lost = Filter()

    def next(self, key: K, rank: int) -> int | None:
        """Return which time this is for a rank, from 0 on; None if that was forgotten."""
        has_gap = self._forgotten is not None and self._forgotten.has_gap
        if has_gap or (key not in self and key in self._lost):
            return None
        counts = self.of(key, dict)
        number = counts.get(rank, 0)
        counts[rank] = number + 1
        return number

    def dropped(self, key: K, value: dict[int, int]) -> None:
        """Remember that ranks were not equally far."""
        if len(value) < self._num_ranks or len(set(value.values())) > 1:
            self._lost.add(key)


class BySite(Generic[V]):
    """What was found out about call sites by looking at their frames; it can be done again."""

    def __init__(self, find: Callable[[CallSite], V]) -> None:
        self._find = find
        self._known: dict[int, tuple[CallSite, V]] = {}

    def of(self, site: CallSite) -> V:
        """Return it for one call site."""
        known = self._known.get(id(site))
        if known is None:
            if len(self._known) >= _MOST_SITES:
                self._known.clear()
            # Kept with its site: the id must not come to belong to another one.
            known = self._known[id(site)] = (site, self._find(site))
        return known[1]
