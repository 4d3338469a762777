"""How far the events of one rank are replayed, and what the rank knows of the others there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from distdiag.alignment import SyncPoint
from distdiag.engine.clocks import NOTHING, Clock, Stamp
from distdiag.engine.gate import Gate
from distdiag.engine.meetings import Meeting
from distdiag.engine.store_edges import Publication
from distdiag.engine.sync_edges import Senders
from distdiag.engine.timed_access import TimedAccess
from distdiag.event import CallSite, Collective, Event, FileAction, FileClosed

RECENT_SYNCS: Final = 64
MOST_CALLS: Final = 1024
"""So many calls whose end is not known are followed; older ones count as waited for."""
_MOST_TRIED: Final = 10_000
_SHOWN_CALLS: Final = 16


class OpenCall(NamedTuple):
    """A call of a rank whose end it has not observed; it then has heard of `senders`."""

    call: Collective
    meeting: Meeting
    senders: Senders


class SyncHistory:
    """The last calls in which a rank and others waited for one another, numbered from 1."""

    def __init__(self) -> None:
        """Remember none yet."""
        self.count = 0
        self._recent: deque[tuple[int, int, SyncPoint]] = deque(maxlen=RECENT_SYNCS)

    def add(self, meeting: Meeting, point: SyncPoint) -> None:
        """Remember the next one."""
        self.count += 1
        self._recent.append((self.count, meeting.number, point))

    def until(self, count: int) -> Iterator[tuple[int, SyncPoint]]:
        """Yield the numbers of the meetings and the calls up to this one, latest first."""
        for number, meeting, point in reversed(self._recent):
            if number <= count:
                yield meeting, point


class Replay:
    """One rank in the replay of all.

    `queue` holds what could not be replayed yet, since its first item waits at `gate`. `soft` are
    calls that are over when the rank goes on, whoever waited for them; `held` those that somebody
    must be seen to wait for; `streamed` those that only the device has waited for. `fed_ns` is the
    time of the last event that came, `sure_ns` the one at the last look. `has_group`: it has
    created a process group.
    """

    def __init__(self, rank: int) -> None:
        """Begin before the first event of the rank."""
        self.rank = rank
        self.host = ""
        self.queue: deque[Event | TimedAccess | Publication] = deque()
        self.gate: Gate | None = None
        self.known: Clock = NOTHING
        self.count = 0
        self.num_done = 0
        self.fed_ns = self.sure_ns = 0
        self.has_left = self.is_incomplete = self.syncs_host = self.has_group = False
        self.soft: dict[int, OpenCall] = {}
        self.held: dict[int, OpenCall] = {}
        self.streamed: dict[int, OpenCall] = {}
        self.open: dict[int, TimedAccess] = {}
        self.history = SyncHistory()
        self.last_sync: SyncPoint | None = None
        self.creation: Meeting | None = None
        self.last_access: TimedAccess | None = None
        self._failed: dict[tuple[str, int], CallSite] = {}
        self._listed: dict[tuple[str, int], CallSite] = {}
        self._listed_after = 0
        self._stamp = Stamp(NOTHING, rank, 0)

    @property
    def is_gone(self) -> bool:
        """Nothing that others could wait for will come from this rank any more."""
        return (self.has_left or self.is_incomplete) and not self.queue

    @property
    def stamp(self) -> Stamp:
        """What others learn who wait for the rank now."""
        stamp = self._stamp
        if stamp.known is not self.known or stamp.num_events != self.count:
            stamp = self._stamp = Stamp(self.known, self.rank, self.count)
        return stamp

    def calls_with(self, call: int) -> dict[int, OpenCall] | None:
        """Return the calls among which the one with this event number is open."""
        if call in self.soft:
            return self.soft
        if call in self.held:
            return self.held
        return self.streamed if call in self.streamed else None

    def next_ns(self) -> int | None:
        """Return the time of the event behind the one that is replayed now, if it has come."""
        return self.queue[1].time_ns if len(self.queue) > 1 else None

    def failure_of(self, access: TimedAccess) -> FileClosed | None:
        """Return that an access, which is replayed now, failed at once, if it is known by now."""
        following = self.queue[1] if len(self.queue) > 1 else None
        if isinstance(following, FileClosed) and following.access == access.event.seq:
            return following if following.error else None
        return None

    def note_failure(self, access: TimedAccess) -> None:
        """Remember that an access failed."""
        if len(self._failed) >= _MOST_TRIED:
            self._failed.clear()
        self._failed[access.event.path, id(access.event.site)] = access.event.site

    def has_failed(self, access: TimedAccess) -> bool:
        """Whether the same has failed before, at the same place of the program."""
        return (access.event.path, id(access.event.site)) in self._failed

    def polls_folder(self, access: TimedAccess) -> bool:
        """Whether the rank lists a folder again at one place, and has waited for nobody since."""
        event = access.event
        if event.action is not FileAction.LIST:
            return False
        if self.history.count != self._listed_after:
            self._listed, self._listed_after = {}, self.history.count
        listing = (event.path, id(event.site))
        is_again = listing in self._listed
        self._listed[listing] = event.site
        return is_again

    def unwaited(self) -> tuple[Collective, ...]:
        """Return the last calls whose end the rank has not observed."""
        if not (self.held or self.streamed):
            return ()
        calls = [each.call for each in (*self.streamed.values(), *self.held.values())]
        return tuple(sorted(calls, key=lambda call: call.seq)[-_SHOWN_CALLS:])
