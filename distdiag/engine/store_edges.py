"""Order by the key-value store: who reads a key comes after who wrote what is read."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

from distdiag.engine.clocks import Stamp
from distdiag.engine.gate import Gate
from distdiag.event import StoreCall

_MOST_KEYS: Final = 100_000
_MOST_PER_KEY: Final = 4096

_PUBLISHING: Final = frozenset({"add", "compare_set", "set"})


class Publication(Gate):
    """A call that sets or counts up a key.

    `stamp` is what its rank knew, None before the call is replayed. `is_settled` is false for an
    ``add`` that has not returned yet; `number` is what it returned, None where that is no number.
    """

    __slots__ = ("call", "is_settled", "number", "stamp")

    def __init__(self, call: StoreCall) -> None:
        """Know no more than its record."""
        super().__init__()
        self.call = call
        self.number: int | None = None
        self.is_settled = call.action != "add"
        self.stamp: Stamp | None = None

    @property
    def rank(self) -> int:
        """Whose call it is."""
        return self.call.rank

    @property
    def time_ns(self) -> int:
        """When it was made."""
        return self.call.time_ns


class StoreEdges:
    """What was published under each key of each store, as far as records of it have come."""

    def __init__(self) -> None:
        """Know of no key."""
        self._by_key: OrderedDict[tuple[str, str], deque[Publication]] = OrderedDict()
        self._unsettled: dict[tuple[str, str, int], Publication] = {}

    def announce(self, call: StoreCall) -> Publication:
        """Take in a call that has not returned, as its record comes."""
        publication = Publication(call)
        if call.action in _PUBLISHING:
            for key in call.keys:
                self._of(call.store, key).append(publication)
                if call.action == "add":
                    self._unsettled[call.store, key, call.rank] = publication
        return publication

    def settle(self, call: StoreCall) -> Iterator[Publication]:
        """Take in a call that has returned; yield those of its rank whose number it tells."""
        if call.action != "add":
            return
        for key in call.keys:
            publication = self._unsettled.pop((call.store, key, call.rank), None)
            if publication is not None:
                publication.number = _number(call.value)
                publication.is_settled = True
                yield publication

    def _of(self, store: str, key: str) -> deque[Publication]:
        if (store, key) not in self._by_key and len(self._by_key) >= _MOST_KEYS:
            self._by_key.popitem(last=False)
        return self._by_key.setdefault((store, key), deque(maxlen=_MOST_PER_KEY))

    def sources(self, call: StoreCall) -> Iterator[Publication]:
        """Yield what this call, which has ended, comes after, as far as it has come.

        Where the value does not tell, all that was published before by the clock counts.
        """
        for key in call.keys:
            earlier = [
                each
                for each in self._by_key.get((call.store, key), ())
                if each.call.rank != call.rank and each.time_ns <= call.time_ns
            ]
            if call.action == "add":
                number = _number(call.value)
                yield from (each for each in earlier if not _is_later(each, number))
            else:
                read = [each for each in earlier if call.value and each.call.value == call.value]
                yield from read or earlier


def _is_later(publication: Publication, number: int | None) -> bool:
    theirs = publication.number
    return number is not None and theirs is not None and theirs > number


def _number(value: str) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None
