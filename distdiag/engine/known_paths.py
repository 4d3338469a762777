"""What ranks have found out about paths by themselves."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from distdiag.engine.path_edges import parents
from distdiag.engine.timed_access import TimedAccess
from distdiag.event import FileAction

_MOST_PATHS: Final = 100_000


class KnownPaths:
    """Which ranks have made or tested which folders, and which files they have seen."""

    def __init__(self) -> None:
        """Know of no path."""
        self._by_path: OrderedDict[str, dict[int, int | None]] = OrderedDict()

    def note(self, access: TimedAccess) -> None:
        """Take in a test, or the making of a folder."""
        event = access.event
        if event.action is FileAction.MAKE_DIR:
            # Who makes a folder makes those above it as well, if they are not there.
            for path in (event.path, *parents(event.path)):
                self._of(path).setdefault(access.rank, None)
        elif event.action is FileAction.TEST:
            ranks = self._of(event.path)
            if event.found and ranks.get(access.rank) is None:
                ranks[access.rank] = access.order
            else:
                ranks.setdefault(access.rank, None)

    def _of(self, path: str) -> dict[int, int | None]:
        if path not in self._by_path and len(self._by_path) >= _MOST_PATHS:
            self._by_path.popitem(last=False)
        return self._by_path.setdefault(path, {})

    def has_looked(self, rank: int, path: str) -> bool:
        """Whether a rank has made this folder, or tested whether it is there."""
        return rank in self._by_path.get(path, ())

    def was_seen_before(self, access: TimedAccess) -> bool:
        """Whether the rank had tested before that what it accesses is there."""
        order = self._by_path.get(access.event.path, {}).get(access.rank)
        return order is not None and order < access.order
