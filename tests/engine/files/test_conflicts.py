"""Which accesses to files conflict when nothing orders them."""

from __future__ import annotations

import pytest

from tests.engine.traces import Trace

READ, WRITE = ("read", {}), ("write", {})
APPEND, LINK, CONNECT = ("append", {}), ("link", {}), ("connect", {})
REMOVE, TREE = ("remove", {}), ("remove-tree", {"path": "/d"})
ONTO, AWAY = ("rename", {"origin": "/d/.f"}), ("rename", {"path": "/d/g", "origin": "/d/f"})
FOLDER_AWAY = ("rename", {"path": "/e", "origin": "/d"})
FOLDER_ONTO = ("rename", {"path": "/d", "origin": "/e"})
LIST, LIST_ABOVE = ("list", {"path": "/d"}), ("list", {"path": "/"})
NEW_FOLDER, OLD_FOLDER = ("make-dir", {"path": "/d"}), ("make-dir", {"path": "/d", "error": "old"})
TEST, LOCK = ("test", {"found": True}), ("lock", {"path": "/d/lock"})
EXCLUSIVE = ("write", {"is_exclusive": True})

TABLE = [
    (WRITE, READ, "read-of-write"),
    (ONTO, READ, "read-of-write"),
    (LINK, READ, "read-of-write"),
    (APPEND, READ, "read-of-write"),
    (WRITE, CONNECT, "read-of-write"),
    (NEW_FOLDER, WRITE, "read-of-write"),
    (NEW_FOLDER, LIST, "read-of-write"),
    (FOLDER_ONTO, READ, "read-of-write"),
    (WRITE, WRITE, "two-writes"),
    (WRITE, ONTO, "two-writes"),
    (ONTO, ONTO, "two-writes"),
    (APPEND, WRITE, "two-writes"),
    (EXCLUSIVE, WRITE, "two-writes"),
    (REMOVE, READ, "use-of-removed"),
    (REMOVE, WRITE, "use-of-removed"),
    (REMOVE, REMOVE, "use-of-removed"),
    (REMOVE, ONTO, "use-of-removed"),
    (TREE, READ, "use-of-removed"),
    (TREE, LIST, "use-of-removed"),
    (TREE, NEW_FOLDER, "use-of-removed"),
    (TREE, OLD_FOLDER, "use-of-removed"),
    (AWAY, READ, "use-of-removed"),
    (FOLDER_AWAY, WRITE, "use-of-removed"),
    (WRITE, LIST, "list-of-changed"),
    (ONTO, LIST, "list-of-changed"),
    (REMOVE, LIST, "list-of-changed"),
    (AWAY, LIST, "list-of-changed"),
    (READ, READ, None),
    (READ, LIST, None),
    (LIST, LIST, None),
    (APPEND, APPEND, None),
    (APPEND, LIST, None),
    (NEW_FOLDER, NEW_FOLDER, None),
    (OLD_FOLDER, WRITE, None),
    (OLD_FOLDER, LIST, None),
    (WRITE, LIST_ABOVE, None),
    (EXCLUSIVE, EXCLUSIVE, None),
    (TEST, WRITE, None),
    (TEST, REMOVE, None),
    (LOCK, LIST, None),
]


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(("one", "other", "conflict"), TABLE)
def test_what_conflicts_with_what(one, other, conflict, is_reversed):
    trace = Trace()
    accesses = [(0, one), (1, other)]
    for rank, (action, fields) in reversed(accesses) if is_reversed else accesses:
        given = dict(fields)
        error = given.pop("error", "")
        access = trace.access(rank, action, line=rank + 1, **given)
        if error:
            trace.close(access, error=error)
    races = trace.races
    assert [race.conflict.value for race in races] == ([conflict] if conflict else [])
    if conflict and one[0] != other[0] and conflict != "two-writes":
        assert (set(races[0].changes), set(races[0].uses)) == ({0}, {1})
