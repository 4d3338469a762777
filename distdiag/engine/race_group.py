"""One race: what ranks did to files at the same two places of the program."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from distdiag.alignment import Access, Conflict, Race, SyncPoint
from distdiag.engine.timed_access import TimedAccess
from distdiag.event import CallSite, FileAction, Frame, Raised

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
        """Begin without any access."""
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
