"""An access to a file with its place in the order of events."""

from __future__ import annotations

from distdiag.alignment import SyncPoint
from distdiag.engine.clocks import Stamp
from distdiag.engine.conflicts import Role
from distdiag.engine.gate import Gate
from distdiag.event import Collective, FileAccess, FileClosed


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
        """Know no more than its record and the host of its rank."""
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
