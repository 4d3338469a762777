"""One race: what ranks did to files at the same two places of the program."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import IntEnum, auto
from typing import Final, NamedTuple

from distdiag.engine.clocks import Gate, Stamp
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Collective
from distdiag.events.files import FileAccess, FileAction, FileClosed
from distdiag.events.lifecycle import Raised
from distdiag.views.files import Access, Conflict, Race, SyncPoint

# Which accesses to paths can harm one another when nothing orders them.


class Role(IntEnum):
    """What an access does to one path (a number, since its hash is taken very often)."""

    READ = auto()
    LIST = auto()
    WRITE = auto()  # its content is new afterwards, or begins to be
    APPEND = auto()
    TAKE = auto()  # it is gone afterwards, with all below it
    MAKE = auto()  # a folder is there that was not there before
    ENTER = auto()  # a folder is there, as it was before


class Harm(NamedTuple):
    """What can go wrong between two accesses, and which of them change something."""

    conflict: Conflict
    first_changes: bool
    second_changes: bool


CHANGING: Final = frozenset({Role.WRITE, Role.APPEND, Role.TAKE, Role.MAKE})
SEEN_IN_LISTS: Final = frozenset({Role.WRITE, Role.TAKE, Role.MAKE})

PREFERENCE: Final = (
    Conflict.READ_OF_WRITE,
    Conflict.TWO_WRITES,
    Conflict.USE_OF_REMOVED,
    Conflict.LIST_OF_CHANGED,
)
"""Where two accesses conflict in several ways, the first of these is reported."""

_ROLES: Final = {
    FileAction.READ: Role.READ,
    FileAction.CONNECT: Role.READ,
    FileAction.WRITE: Role.WRITE,
    FileAction.RENAME: Role.WRITE,
    FileAction.LINK: Role.WRITE,
    FileAction.APPEND: Role.APPEND,
    FileAction.REMOVE: Role.TAKE,
    FileAction.REMOVE_TREE: Role.TAKE,
    FileAction.LIST: Role.LIST,
    FileAction.MAKE_DIR: Role.MAKE,
}

_UNEQUAL: Final[dict[tuple[Role, Role], Conflict]] = {
    (Role.WRITE, Role.READ): Conflict.READ_OF_WRITE,
    (Role.APPEND, Role.READ): Conflict.READ_OF_WRITE,
    (Role.MAKE, Role.LIST): Conflict.READ_OF_WRITE,
    (Role.WRITE, Role.APPEND): Conflict.TWO_WRITES,
    **{(Role.TAKE, role): Conflict.USE_OF_REMOVED for role in Role if role is not Role.TAKE},
}
_EQUAL: Final = {Role.WRITE: Conflict.TWO_WRITES, Role.TAKE: Conflict.USE_OF_REMOVED}


def roles_of(event: FileAccess, *, has_failed: bool) -> tuple[tuple[str, Role], ...]:
    """Return what an access does to which paths.

    A folder that could not be made was there already: `has_failed`.
    """
    role = _ROLES.get(event.action)
    if role is None:
        return ()
    if role is Role.MAKE and has_failed:
        role = Role.ENTER
    if event.action is FileAction.RENAME and event.origin:
        return ((event.path, role), (event.origin, Role.TAKE))
    return ((event.path, role),)


def reaches_below(event: FileAccess, role: Role) -> bool:
    """Whether what an access does to a path matters to all that lies below it."""
    return role in (Role.TAKE, Role.MAKE) or event.action is FileAction.RENAME


def _harm(first: Role, second: Role) -> Harm | None:
    if first is second:
        conflict = _EQUAL.get(first)
        return Harm(conflict, True, True) if conflict else None
    if (first, second) in _UNEQUAL:
        conflict = _UNEQUAL[first, second]
        return Harm(conflict, True, conflict is Conflict.TWO_WRITES)
    if (second, first) in _UNEQUAL:
        conflict = _UNEQUAL[second, first]
        return Harm(conflict, conflict is Conflict.TWO_WRITES, True)
    return None


AT_ONE_PATH: Final = {
    (first, second): harm
    for first in Role
    for second in Role
    if (harm := _harm(first, second)) is not None
}
"""What accesses to one path in these two roles do to one another."""


def below(top: Role) -> Conflict:
    """Return what an access that reaches below its path does to accesses there."""
    return Conflict.USE_OF_REMOVED if top is Role.TAKE else Conflict.READ_OF_WRITE


# An access to a file with its place in the order of events.


class TimedAccess(Gate):
    """An access to a file, from when it came until it is forgotten.

    `stamp` is what its rank knew when it began, None before it is replayed, `roles` what it does to
    which paths. `end` is the number of
    the event on files with which it was over, None while it is open. `order` and `num_syncs` count
    the events of its rank, and the waits for others, before it.
    """

    __slots__ = (
        "closed",
        "end",
        "event",
        "host",
        "is_before_init",
        "is_followed",
        "last_sync",
        "num_syncs",
        "order",
        "roles",
        "stamp",
        "unwaited",
    )

    def __init__(self, event: FileAccess, host: str) -> None:
        super().__init__()
        self.event = event
        self.host = host
        self.stamp: Stamp | None = None
        self.end: int | None = None
        self.closed: FileClosed | None = None
        self.order = self.num_syncs = 0
        self.last_sync: SyncPoint | None = None
        self.unwaited: tuple[Collective, ...] = ()
        self.is_before_init = self.is_followed = False
        self.roles: tuple[tuple[str, Role], ...] = ()

    @property
    def rank(self) -> int:
        """Whose access it is."""
        return self.event.rank

    @property
    def time_ns(self) -> int:
        """When it began."""
        return self.event.time_ns

    @property
    def is_settled(self) -> bool:
        """Whether its record says all that others need to know."""
        return True

    @property
    def is_void(self) -> bool:
        """Whether it has changed nothing: it was to create a file that another one had created."""
        return self.event.is_exclusive and bool(self.closed and self.closed.error)

    def may_meet(self, other: TimedAccess) -> bool:
        """Whether the same path is the same file for both, and they are of different ranks."""
        mine, theirs = self.event, other.event
        is_same_file = self.host == other.host or (mine.is_shared and theirs.is_shared)
        return mine.rank != theirs.rank and is_same_file

    def comes_after(self, other: TimedAccess) -> bool:
        """Whether this one, which has begun, did so after the other was over."""
        assert self.stamp is not None
        return other.end is not None and self.stamp.known.get(other.rank, 0) >= other.end


# The accesses of two places of the program, until one race is known.

MOST_PATHS: Final = 100
_MOST_OPEN: Final = 256
_MOST_LISTINGS: Final = 16
_LOOKING: Final = frozenset({FileAction.READ, FileAction.LIST, FileAction.CONNECT})

Place = tuple[str, int]
RaceKey = tuple[Conflict, Place, Place]


class Pair(NamedTuple):
    """Two accesses to one path that nothing orders; of two changes either may be `change`."""

    conflict: Conflict
    change: TimedAccess
    use: TimedAccess
    path: str
    is_mutual: bool

    @property
    def key(self) -> RaceKey:
        """Which race it belongs to."""
        one, other = place_of(self.change.event.site), place_of(self.use.event.site)
        if self.is_mutual and other < one:
            one, other = other, one
        return (self.conflict, one, other)


def place_of(site: CallSite) -> Place:
    """Return the file and line of the user that a call was made at."""
    frame = _frame_of(site)
    return (frame.file, frame.line) if frame is not None else ("", 0)


def _frame_of(site: CallSite) -> Frame | None:
    return site.location or next(iter(site.frames), None)


class RaceGroup:
    """A race as it grows. `has_news` says that it should be shown again."""

    def __init__(self, conflict: Conflict, common_sync: SyncPoint | None) -> None:
        self.conflict = conflict
        self.has_news = True
        self._common_sync = common_sync
        self._changes: dict[int, TimedAccess] = {}
        self._uses: dict[int, TimedAccess] = {}
        self._listings: dict[int, deque[TimedAccess]] = {}
        self._paths: dict[str, None] = {}
        self._has_struck = False
        self._open: list[Pair] = []

    @property
    def accesses(self) -> tuple[TimedAccess, ...]:
        """All accesses that it shows."""
        return (*self._changes.values(), *self._uses.values())

    def holds(self, pair: Pair) -> bool:
        """Whether there is nothing to learn from these two."""
        if pair.change.rank not in self._changes or pair.use.rank not in self._uses:
            return False
        is_known = pair.path in self._paths or len(self._paths) >= MOST_PATHS
        takes_time = pair.change.event.has_end or pair.use.event.has_end
        may_strike = takes_time and not self._has_struck and len(self._open) < _MOST_OPEN
        may_be_followed = self.conflict is Conflict.LIST_OF_CHANGED
        return is_known and not may_strike and not may_be_followed

    def add(self, pair: Pair) -> None:
        """Take in two accesses."""
        size = (len(self._changes), len(self._uses), len(self._paths))
        sides = [(self._changes, pair.change), (self._uses, pair.use)]
        if pair.is_mutual:
            sides += [(self._changes, pair.use), (self._uses, pair.change)]
        for side, access in sides:
            side.setdefault(access.rank, access)
        if self.conflict is Conflict.LIST_OF_CHANGED:
            listings = self._listings.setdefault(pair.use.rank, deque(maxlen=_MOST_LISTINGS))
            listings.append(pair.use)
        if len(self._paths) < MOST_PATHS:
            self._paths[pair.path] = None
        if not self._has_struck and len(self._open) < _MOST_OPEN:
            self._open.append(pair)
        if size != (len(self._changes), len(self._uses), len(self._paths)):
            self.has_news = True

    def look(self, *, is_over: bool) -> None:
        """See whether a use lay within a change, as far as both are over."""
        still_open = []
        for pair in self._open:
            if not is_over and not (_is_over(pair.change) and _is_over(pair.use)):
                still_open.append(pair)
            elif _overlap(pair.change, pair.use):
                self._has_struck = self.has_news = True
                still_open = []
                break
        self._open = still_open

    def race(self, raised: Mapping[int, Raised]) -> Race:
        """Return what checks are shown; `raised` are the exceptions by which ranks ended."""
        ended = {
            access.rank: raised[access.rank]
            for access in self.accesses
            if access.rank in raised and _ended_in(access, raised[access.rank], self._paths)
        }
        return Race(
            conflict=self.conflict,
            changes=_views(self._changes),
            uses=_views(self._shown_uses()),
            paths=tuple(self._paths),
            common_sync=self._common_sync,
            has_struck=self._has_struck,
            raised=dict(sorted(ended.items())),
        )

    def _shown_uses(self) -> dict[int, TimedAccess]:
        """Return the first use of each rank; of listings the first one whose entries it used."""
        for rank, listings in self._listings.items():
            if not self._uses[rank].is_followed:
                followed = (access for access in listings if access.is_followed)
                self._uses[rank] = next(followed, self._uses[rank])
        return self._uses


def _views(accesses: Mapping[int, TimedAccess]) -> dict[int, Access]:
    return {
        rank: Access(
            event=access.event,
            closed=access.closed,
            last_sync=access.last_sync,
            unwaited=access.unwaited,
            is_before_init=access.is_before_init,
            is_followed=access.is_followed,
        )
        for rank, access in sorted(accesses.items())
    }


def _is_over(access: TimedAccess) -> bool:
    return access.end is not None


def _span(access: TimedAccess) -> tuple[int, float]:
    if access.end is None:
        return access.time_ns, float("inf")
    return access.time_ns, access.closed.time_ns if access.closed else access.time_ns


def _overlap(change: TimedAccess, use: TimedAccess) -> bool:
    (begin, end), (other_begin, other_end) = _span(change), _span(use)
    return begin <= other_end and other_begin <= end


def _ended_in(access: TimedAccess, raised: Raised, paths: Iterable[str]) -> bool:
    """Whether the exception came out of this access, or of a later one at the same place."""
    if any(name in raised.message for name in (*paths, access.event.written) if name):
        return True
    last = next((frame for frame in raised.frames if frame.user), None)
    is_there = last is not None and (last.file, last.line) == place_of(access.event.site)
    return is_there and access.event.action in _LOOKING
