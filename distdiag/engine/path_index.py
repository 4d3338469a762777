"""The last accesses to each path, of each rank from each place of the program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from distdiag.engine.conflicts import CHANGING, Role, reaches_below
from distdiag.engine.path_edges import parents
from distdiag.engine.timed_access import TimedAccess

MOST_ACCESSES: Final = 200_000

_Key = tuple[int, str, Role, int, int]
Entry = tuple[TimedAccess, Role]


class PathState:
    """What is remembered of one path."""

    __slots__ = ("changes", "lists", "others")

    def __init__(self) -> None:
        """Remember nothing yet."""
        self.changes: dict[_Key, Entry] = {}
        self.lists: dict[_Key, Entry] = {}
        self.others: dict[_Key, Entry] = {}

    def part(self, role: Role) -> dict[_Key, Entry]:
        """Return where accesses in this role are kept."""
        if role in CHANGING:
            return self.changes
        return self.lists if role is Role.LIST else self.others

    def all(self) -> Iterator[Entry]:
        """Yield all accesses with their roles."""
        yield from self.changes.values()
        yield from self.lists.values()
        yield from self.others.values()


class PathIndex:
    """All paths. Of what a rank did at one place only the last is kept, and what is still open.

    The last is enough: whoever comes after it comes after the others. `is_full`: old accesses
    were forgotten, those that changed nothing first.
    """

    def __init__(self, most_accesses: int = MOST_ACCESSES) -> None:
        """Remember so many accesses."""
        self.is_full = False
        self._most = most_accesses
        self._states: dict[str, PathState] = {}
        self._children: dict[str, dict[str, None]] = {}
        self._deep: dict[str, dict[_Key, Entry]] = {}
        # By age, so that the oldest is found at once: a dict would look through those that went.
        self._reads: OrderedDict[tuple[str, _Key], Role] = OrderedDict()
        self._changes: OrderedDict[tuple[str, _Key], Role] = OrderedDict()

    def add(self, path: str, access: TimedAccess, role: Role) -> None:
        """Remember an access that begins."""
        state = self._states.get(path)
        if state is None:
            state = self._states[path] = PathState()
            self._hang_below(path)
        key = _key(access, role)
        state.part(role)[key] = (access, role)
        ages = self._changes if role in CHANGING else self._reads
        ages[path, key] = role
        ages.move_to_end((path, key))
        if reaches_below(access.event, role):
            self._deep.setdefault(path, {})[key] = (access, role)
        if len(self._reads) + len(self._changes) > self._most:
            self.is_full = True
            oldest = self._reads or self._changes
            oldest_path, oldest_key = next(iter(oldest))
            self._forget(oldest_path, oldest_key, oldest[oldest_path, oldest_key])

    def close(self, path: str, access: TimedAccess, role: Role) -> None:
        """Let an access that is over take the place of the one before it."""
        self.remove(path, access, role, is_open=True)
        self.add(path, access, role)

    def remove(self, path: str, access: TimedAccess, role: Role, *, is_open: bool) -> None:
        """Forget an access."""
        self._forget(path, _key(access, role, is_open=is_open), role)

    def _forget(self, path: str, key: _Key, role: Role) -> None:
        ages = self._changes if role in CHANGING else self._reads
        if ages.pop((path, key), None) is None:
            return
        state = self._states[path]
        del state.part(role)[key]
        deep = self._deep.get(path, {})
        if deep.pop(key, None) is not None and not deep:
            del self._deep[path]
        if not (state.changes or state.lists or state.others):
            del self._states[path]
            self._unhang(path)

    def _hang_below(self, path: str) -> None:
        for folder in parents(path):
            children = self._children.setdefault(folder, {})
            if path in children:
                return
            children[path] = None
            path = folder

    def _unhang(self, path: str) -> None:
        for folder in parents(path):
            if path in self._children or path in self._states:
                return
            children = self._children[folder]
            del children[path]
            if children:
                return
            del self._children[folder]
            path = folder

    def at(self, path: str) -> PathState | None:
        """Return what is remembered of a path."""
        return self._states.get(path)

    def children(self, folder: str) -> Iterator[tuple[str, PathState]]:
        """Yield the direct entries of a folder, and what is remembered of them."""
        for path in self._children.get(folder, ()):
            if path in self._states:
                yield path, self._states[path]

    def below(self, folder: str) -> Iterator[tuple[str, PathState]]:
        """Yield all that lies below a folder, and what is remembered of it."""
        pending = list(self._children.get(folder, ()))
        while pending:
            path = pending.pop()
            pending += self._children.get(path, ())
            if path in self._states:
                yield path, self._states[path]

    def reaching(self, path: str) -> Iterator[Entry]:
        """Yield the accesses to folders above a path that matter to it."""
        if self._deep:
            for folder in parents(path):
                yield from self._deep.get(folder, {}).values()


def _key(access: TimedAccess, role: Role, *, is_open: bool | None = None) -> _Key:
    event = access.event
    if is_open is None:
        is_open = access.end is None
    number = event.seq if is_open else -1
    return (event.rank, event.action, role, id(event.site), number)
