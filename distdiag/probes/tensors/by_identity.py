"""Weak collections that know objects by identity: a model may have a hash of its own.

That of a metric, for one, depends on what it has counted, and cannot be had in its constructor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, MutableSet
from typing import Any, TypeVar, overload

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_T = TypeVar("_T")


class WeakMap(MutableMapping[_Key, _Value]):
    """Values by objects, which it does not keep alive."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def __getitem__(self, key: _Key) -> _Value:
        reference, value = self._items[id(key)]
        if reference() is not key:
            raise KeyError(id(key))
        return value

    # Without the exceptions of those that are inherited: both are asked for in each step.

    @overload
    def get(self, key: _Key, /) -> _Value | None: ...
    @overload
    def get(self, key: _Key, /, default: _Value | _T) -> _Value | _T: ...
    def get(self, key: _Key, /, default: object = None) -> object:
        """Return the value of an object, or the default."""
        found = self._items.get(id(key))
        return default if found is None or found[0]() is not key else found[1]

    def __contains__(self, key: object) -> bool:
        found = self._items.get(id(key))
        return found is not None and found[0]() is key

    def __setitem__(self, key: _Key, value: _Value) -> None:
        number = id(key)
        self._items[number] = (weakref.ref(key, _dropping(self._items, number)), value)

    def __delitem__(self, key: _Key) -> None:
        self[key]
        del self._items[id(key)]

    def __iter__(self) -> Iterator[_Key]:
        for reference, _ in list(self._items.values()):
            key = reference()
            if key is not None:
                yield key

    def __len__(self) -> int:
        return len(self._items)


class WeakMembers(MutableSet[_Key]):
    """Objects, which it does not keep alive."""

    def __init__(self) -> None:
        self._map: WeakMap[_Key, None] = WeakMap()

    def __contains__(self, one: object) -> bool:
        return self._map.__contains__(one)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def add(self, value: _Key) -> None:
        """Take in an object."""
        self._map[value] = None

    def discard(self, value: _Key) -> None:
        """Leave out an object, if it is in."""
        self._map.pop(value, None)


def _dropping(items: dict[int, Any], number: int) -> Callable[[object], None]:
    def drop(reference: object) -> None:
        # Another object may have the number by now.
        if number in items and items[number][0] is reference:
            del items[number]

    return drop
