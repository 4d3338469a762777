"""Replay the events of all ranks in an order that respects who waited for whom.

Events of different ranks come in any interleaving. Those of each rank are replayed in their own
order, and a wait is replayed when all that it waited for has been. So what is replayed before an
access either happened before it, which the clocks tell, or is not ordered with it.
"""

from __future__ import annotations

from collections.abc import Collection

from distdiag.alignment import SyncPoint
from distdiag.engine.path_edges import PathEdges
from distdiag.engine.schedule import NEVER, Schedule
from distdiag.engine.steps import AccessWatch, Steps
from distdiag.engine.store_edges import Publication, StoreEdges
from distdiag.engine.sync_edges import RECORDS_OF_ORDER
from distdiag.engine.timed_access import TimedAccess
from distdiag.event import (
    Collective,
    CollectiveState,
    Event,
    Exited,
    FileAccess,
    Finished,
    ProbeDisabled,
    RankStarted,
    StoreCall,
)
from distdiag.ranks import RankSet


class HappensBefore:
    """The order of what all ranks did."""

    def __init__(self, world: RankSet, watch: AccessWatch) -> None:
        """Tell `watch` of the accesses of these ranks."""
        self._paths = PathEdges()
        self._store = StoreEdges()
        self._schedule = Schedule(world)
        self._steps = Steps(self._schedule, self._store, self._paths, watch).by_kind()

    @property
    def problem(self) -> str:
        """Why not all accesses can be judged, or an empty string."""
        if self._schedule.problem:
            return self._schedule.problem
        if self._schedule.doubted_ns < NEVER:
            return "from some moment on it is not known wholly who waited for whom"
        return ""

    # What goes in

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        kind = type(event)
        if kind is Collective or kind is CollectiveState:
            self._feed_call(event, kind)
        elif kind is FileAccess or kind in self._steps:
            self._feed_other(event)
        else:
            self._feed_rare(event)

    def _feed_call(self, event: Event, kind: type[Event]) -> None:
        """Take in the most frequent kinds of events by the shortest way."""
        schedule = self._schedule
        replay = schedule.replays[event.rank]
        replay.fed_ns = event.time_ns
        if schedule.take(replay, event, self._steps[kind]):
            if schedule.woken:
                schedule.go_on(self._steps)
        else:
            schedule.enqueue(replay, event, self._steps)

    def _feed_other(self, event: Event) -> None:
        replay = self._schedule.replays[event.rank]
        replay.fed_ns = event.time_ns
        item: Event | TimedAccess | Publication = event
        if isinstance(event, FileAccess):
            item = TimedAccess(event, replay.host)
            self._paths.announce(item)
        elif isinstance(event, StoreCall) and not event.done:
            item = self._store.announce(event)
        elif isinstance(event, StoreCall):
            for publication in self._store.settle(event):
                self._schedule.wake(publication)
        self._schedule.enqueue(replay, item, self._steps)

    def _feed_rare(self, event: Event) -> None:
        replay = self._schedule.replays[event.rank]
        match event:
            case RankStarted():
                replay.host = event.hostname
            case Finished() | Exited():
                self._schedule.leave(replay)
            case ProbeDisabled():
                is_order = event.probe in RECORDS_OF_ORDER
                if is_order or event.probe.startswith("file"):
                    self._schedule.doubt_rank(replay, event.time_ns, is_order=is_order)
        self._schedule.go_on(self._steps)

    def advance(self, now_ns: int, unseen: Collection[int] = ()) -> None:
        """Let time pass: some waits depend on what others had done by then.

        Nothing can be heard now of the ranks in `unseen`.
        """
        self._schedule.advance(now_ns, unseen)
        self._schedule.go_on(self._steps)

    def end(self) -> None:
        """Nothing more comes: replay what waits in vain as if it had been satisfied."""
        self._schedule.end(self._steps)

    def doubt(self, since_ns: int) -> None:
        """From this time on, do not believe that accesses are not ordered."""
        self._schedule.doubt(since_ns)

    # What comes out

    def is_sure(self, *accesses: TimedAccess) -> bool:
        """Whether an order of these cannot have been missed."""
        return not self._schedule.is_doubtful(*accesses)

    def is_lock(self, path: str) -> bool:
        """Whether a file serves as a lock."""
        return path in self._paths.lock_paths

    def has_gone_on(self, access: TimedAccess) -> bool:
        """Whether its rank has done something since: it would have locked the file by now."""
        replay = self._schedule.replays[access.rank]
        return self._schedule.is_over or replay.is_gone or replay.num_done > access.order + 1

    def common_sync(self, use: TimedAccess, change: TimedAccess) -> SyncPoint | None:
        """Return the last call before the use that the changing rank had made before, too."""
        replays = self._schedule.replays
        theirs = {number for number, _ in replays[change.rank].history.until(change.num_syncs)}
        mine = replays[use.rank].history.until(use.num_syncs)
        return next((point for number, point in mine if number in theirs), None)
