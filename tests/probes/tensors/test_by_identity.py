from __future__ import annotations

import gc

import pytest

from distdiag.probes.tensors.by_identity import WeakMap, WeakMembers


class Odd:
    """Has neither a hash nor an equality that could be asked for."""

    def __hash__(self) -> int:
        raise AttributeError("it is not made yet")

    def __eq__(self, other: object) -> bool:
        raise AttributeError("it is not made yet")


def test_values_are_found_by_identity() -> None:
    one, other = Odd(), Odd()
    found: WeakMap[Odd, int] = WeakMap()

    found[one] = 1
    found[one] = 2

    assert found[one] == 2
    assert one in found
    assert other not in found
    assert found.get(other, 7) == 7
    with pytest.raises(KeyError):
        found[other]
    assert found.setdefault(other, 3) == 3
    assert found.pop(one) == 2
    assert [value for _, value in found.items()] == [3]


def test_what_is_gone_is_left_out() -> None:
    one, found = Odd(), WeakMap[Odd, int]()
    found[one] = 1

    del one
    gc.collect()

    assert len(found) == 0
    assert not list(found)


def test_members_are_kept_weakly() -> None:
    one, other = Odd(), Odd()
    members: WeakMembers[Odd] = WeakMembers()

    members.add(one)
    members.add(one)
    members.add(other)
    members.discard(other)
    members.discard(other)

    assert one in members
    assert other not in members
    assert len(members) == 1
    del one
    gc.collect()
    assert not list(members)
