"""Replay the events of all ranks in an order that respects who waited for whom.

Events of different ranks come in any interleaving. Those of each rank are replayed in their own
order, and a wait is replayed when all that it waited for has been. So what is replayed before an
access either happened before it, which the clocks tell, or is not ordered with it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, Protocol

from distdiag.engine.clocks import Gate, Joiner, Stamp
from distdiag.engine.collectives.calls import Meeting, Meetings
from distdiag.engine.collectives.sync_edges import (
    NOBODY,
    RECORDS_OF_ORDER,
    Senders,
    creates_in_step,
    is_waited_unseen,
    senders_of,
)
from distdiag.engine.files.conflicts import TimedAccess
from distdiag.engine.files.order import (
    MOST_CALLS,
    NEVER,
    OpenCall,
    PathEdges,
    Publication,
    Replay,
    Schedule,
    Step,
    StoreEdges,
)
from distdiag.events.base import Event
from distdiag.events.collectives import Collective, CollectiveState, GroupCreated, blocks_host
from distdiag.events.files import FileAccess, FileAction, FileClosed, HostSynced, StoreCall
from distdiag.events.lifecycle import (
    EventsLost,
    Exited,
    Finished,
    ProbeDisabled,
    RankStarted,
    StepEnd,
)
from distdiag.events.ranks import RankSet
from distdiag.views.files import SyncPoint

# What each kind of event means for the order: whom its rank lets go on, and for whom it waits.

_NO_ACCESS: Final = frozenset({FileAction.TEST, FileAction.LOCK, FileAction.UNLOCK})


class AccessWatch(Protocol):
    """Who is given accesses to files, in the order of the replay."""

    def begin(self, access: TimedAccess) -> None:
        """Take in an access that begins; its stamp is set."""

    def end(self, access: TimedAccess) -> None:
        """Take in that an access that took time is over."""


class Steps:
    """The steps of the replay, by kind of event."""

    def __init__(
        self, schedule: Schedule, store: StoreEdges, paths: PathEdges, watch: AccessWatch
    ) -> None:
        """Replay on this schedule; `store` and `paths` know what has come."""
        self._schedule = schedule
        self._store = store
        self._paths = paths
        self._watch = watch
        self._joiner = Joiner()
        self._meetings = Meetings(RankSet(schedule.replays))

    def by_kind(self) -> dict[type, Step]:
        """Return the step for each kind of event that matters."""
        return {
            Collective: self.issue,
            CollectiveState: self.follow,
            GroupCreated: self.create_group,
            Publication: self.publish,
            StoreCall: self.learn_from_store,
            HostSynced: self.sync_host,
            StepEnd: self.settle,
            TimedAccess: self.access,
            FileClosed: self.close,
        }

    # Calls in which ranks wait for one another

    def issue(self, replay: Replay, call: Collective) -> Gate | None:
        """Let others go on that wait for this call; who made it waits later."""
        if replay.soft and call.api is not None:
            gate = self.settle(replay)
            if gate is not None:
                return gate
        if replay.streamed and not blocks_host(call.group, call.signature.op):
            # Where it runs, those run before it.
            gate = self._acquire_all(replay, replay.streamed)
            if gate is not None:
                return gate
        if call.collective_seq_id < 0:
            self._send_or_receive(replay, call)
            return None
        meeting = self._meetings.collective(call, replay.stamp)
        if not meeting.is_whole:
            self._schedule.doubt(call.time_ns)
        self._came(replay, OpenCall(call, meeting, senders_of(call)))
        return None

    def _send_or_receive(self, replay: Replay, call: Collective) -> None:
        peer = call.signature.peer
        if peer not in self._schedule.replays:
            # It may come from anybody, or from a rank that is not observed.
            self._schedule.doubt(call.time_ns)
            return
        senders = NOBODY if call.signature.op == "send" else (peer,)
        meeting = self._meetings.message(call, peer, replay.stamp)
        if meeting is None:
            self._schedule.doubt(call.time_ns)
            return
        self._came(replay, OpenCall(call, meeting, senders))

    def _came(self, replay: Replay, opened: OpenCall) -> None:
        call = opened.call
        if opened.meeting.is_awaited(replay.rank):
            self._schedule.wake(opened.meeting)
        if opened.senders == NOBODY:
            replay.history.add(opened.meeting, call)
            return
        is_streamed = replay.syncs_host and not blocks_host(call.group, call.signature.op)
        if is_waited_unseen(call) or not (call.is_async or is_streamed):
            calls = replay.soft
        elif is_streamed:
            calls = replay.streamed
        else:
            calls = replay.held
        calls[call.seq] = opened
        if len(calls) > MOST_CALLS:
            oldest = next(iter(calls))
            replay.soft[oldest] = calls.pop(oldest)

    def follow(self, replay: Replay, event: CollectiveState) -> Gate | None:
        """Let a rank that observed the end of a call come after those for whom it waited."""
        calls = replay.soft if event.call in replay.soft else replay.calls_with(event.call)
        is_early = event.state == "issued" or (event.state == "waited" and calls is replay.streamed)
        if calls is None or is_early:
            return None
        if event.state in ("waited", "completed"):
            gate = self._acquire_call(replay, calls[event.call])
            if gate is not None:
                return gate
        del calls[event.call]
        return None

    def settle(self, replay: Replay, _event: Event | None = None) -> Gate | None:
        """Let a rank that goes on have waited for what nobody is seen to wait for."""
        return self._acquire_all(replay, replay.soft) if replay.soft else None

    def sync_host(self, replay: Replay, _event: HostSynced) -> Gate | None:
        """Let the host come after all that the device has waited for."""
        replay.syncs_host = True
        for number, opened in tuple(replay.held.items()):
            if not blocks_host(opened.call.group, opened.call.signature.op):
                replay.streamed[number] = replay.held.pop(number)
        return self.settle(replay) or self._acquire_all(replay, replay.streamed)

    def create_group(self, replay: Replay, call: GroupCreated) -> Gate | None:
        """Let all ranks that create a group meet, where the backend makes them."""
        gate = self.settle(replay)
        if gate is not None or call.api.startswith("destroy"):
            return gate
        if not call.done:
            replay.creation = self._meetings.creation(call, replay.stamp)
            if replay.creation.is_awaited(replay.rank):
                self._schedule.wake(replay.creation)
        elif replay.creation is not None:
            if creates_in_step(call):
                gate = self._acquire(replay, replay.creation, None, call)
            replay.has_group = replay.has_group or gate is None
        return gate

    def _acquire_all(self, replay: Replay, calls: dict[int, OpenCall]) -> Gate | None:
        for number, opened in tuple(calls.items()):
            gate = self._acquire_call(replay, opened)
            if gate is not None:
                return gate
            del calls[number]
        return None

    def _acquire_call(self, replay: Replay, opened: OpenCall) -> Gate | None:
        return self._acquire(replay, opened.meeting, opened.senders, opened.call)

    def _acquire(
        self, replay: Replay, meeting: Meeting, senders: Senders, point: SyncPoint
    ) -> Gate | None:
        if not meeting.is_ready(senders):
            meeting.want(senders)
            schedule = self._schedule
            if not (
                schedule.has_absent and schedule.may_go_on(meeting.missing(senders), point.time_ns)
            ):
                return meeting
        replay.known = meeting.known_to(replay.stamp, senders, self._joiner)
        replay.history.add(meeting, point)
        replay.last_sync = point
        return None

    # The store

    def publish(self, replay: Replay, publication: Publication) -> Gate | None:
        """Let those go on who read what this call writes."""
        gate = self.settle(replay)
        if gate is None:
            publication.stamp = replay.stamp
            self._schedule.wake(publication)
        return gate

    def learn_from_store(self, replay: Replay, call: StoreCall) -> Gate | None:
        """Let a rank that has read come after who wrote that."""
        gate = self.settle(replay)
        if gate is None and call.time_ns > self._schedule.horizon_ns:
            gate = self._schedule.horizon
        return gate or self._learn(replay, self._store.sources(call), call.time_ns)

    def _learn(
        self, replay: Replay, sources: Iterable[Publication | TimedAccess], time_ns: int
    ) -> Gate | None:
        stamps = [Stamp(replay.known, replay.rank, 0)]
        for source in sources:
            if source.stamp is not None and source.is_settled:
                stamps.append(source.stamp)
            elif not self._schedule.may_go_on((source.rank,), time_ns):
                return source
        replay.known = self._joiner.meet(stamps)
        return None

    # Files

    def access(self, replay: Replay, access: TimedAccess) -> Gate | None:
        """Give an access its place in the order."""
        gate = self.settle(replay) or self._learn_from_paths(replay, access)
        if gate is not None:
            return gate
        event = access.event
        if event.action not in _NO_ACCESS:
            replay.count += 1
        access.stamp = replay.stamp
        access.order, access.num_syncs = replay.num_done, replay.history.count
        access.last_sync, access.unwaited = replay.last_sync, replay.unwaited()
        access.is_before_init = not replay.has_group
        access.closed = replay.failure_of(access)
        replay.last_access = access
        if event.has_end:
            replay.open[event.seq] = access
        else:
            access.end = replay.count
        self._watch.begin(access)
        self._schedule.wake(access)
        return None

    def _learn_from_paths(self, replay: Replay, access: TimedAccess) -> Gate | None:
        schedule = self._schedule
        deadline_ns = self._paths.deadline(replay, access)
        if deadline_ns is None:
            if not (schedule.is_ending or replay.has_left):
                return schedule.own_next
            deadline_ns = NEVER if schedule.is_ending else access.time_ns + 1
        if not deadline_ns:
            return None
        if deadline_ns > schedule.horizon_ns:
            return schedule.horizon
        return self._learn(replay, self._paths.sources(access, deadline_ns), access.time_ns)

    def close(self, replay: Replay, event: FileClosed) -> None:
        """Let an access that took time be over."""
        access = replay.open.pop(event.access, None)
        if access is not None:
            replay.count += 1
            access.end = replay.count
        else:
            access = replay.last_access
        if access is None or access.event.seq != event.access:
            return
        access.closed = event
        if event.error:
            replay.note_failure(access)
        self._watch.end(access)


# The replay, which gives each event its clock.

FORGOTTEN: Final = "the oldest of very many accesses were forgotten"


class HappensBefore:
    """The order of what all ranks did."""

    def __init__(self, world: RankSet, watch: AccessWatch) -> None:
        """Tell `watch` of the accesses of these ranks."""
        self._paths = PathEdges()
        self._store = StoreEdges()
        self._schedule = Schedule(world)
        self._steps = Steps(self._schedule, self._store, self._paths, watch).by_kind()
        self._is_full = False

    @property
    def problem(self) -> str:
        """Why not all accesses can be judged, or an empty string."""
        if self._schedule.problem:
            return self._schedule.problem
        if self._schedule.doubted_ns < NEVER:
            return (
                "who waited for whom: that is not known from the point on where calls do not match"
            )
        return FORGOTTEN if self._is_full else ""

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
            case EventsLost():
                self._schedule.doubt_rank(replay, event.time_ns, is_order=True)
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
        return self._paths.is_lock(path)

    @property
    def size(self) -> int:
        """How much is kept that ranks may come after."""
        return self._paths.size + self._store.size

    def compact(self) -> Mapping[int, int]:
        """Drop what all ranks know of; return how many events of each rank they know."""
        known = self._schedule.known_to_all()
        is_full = [each.compact(known) for each in (self._paths, self._store)]
        self._is_full = self._is_full or any(is_full)
        return known

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
