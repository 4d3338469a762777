"""What one rank has done so far, kept while its events arrive."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Final

from distdiag.engine.bounded import Recent
from distdiag.events.base import CallSite, Event, Phase
from distdiag.events.collectives import (
    Collective,
    CollectiveState,
    GroupCreated,
    GroupProgress,
)
from distdiag.events.environment import NodeClock, SourceSeen
from distdiag.events.files import MAKING, FileAccess, StoreAsked, StoreCall
from distdiag.events.lifecycle import (
    ChildEnded,
    EventsLost,
    Exited,
    Finished,
    Heartbeat,
    NodeLost,
    ProbeDisabled,
    ProcessNamed,
    Raised,
    RankStarted,
    Signalled,
    StepEnd,
    TorchLoaded,
)
from distdiag.events.stacks import FaultLogged, Observed, Stacks
from distdiag.views.rank_states import Help, RankState, RankStatus

RECENT: Final = 64
BUSY_SHARE: Final = 0.3
"""A rank that used the processor for this share of the last while works; it does not hang."""
WINDOW_S: Final = 30.0
"""What a rank used longer ago than the hang threshold (this one, or the user's) tells nothing."""
SHORTEST_WINDOW_S: Final = 5.0
"""In less the kernel's hundredths, and pauses between children, would count for too much."""
BEATS_PER_WINDOW: Final = 30
HELP_LEAST_S: Final = 1.0
"""The table of processes is read once a second: it takes two samples."""
CHILDREN_SHARE: Final = 0.1
"""Children that used this share of one processor work: idle ones that poll use below 0.02."""
IO_PER_S: Final = 64 << 10
"""A rank that reads or writes so many bytes a second works: a loop that polls a file needs less."""
HELP_PATIENCE_S: Final = 1800.0
"""The default timeout of process groups: for longer nobody's peers wait, whoever works for it."""
GIL_SILENCE_NS: Final = 2_500_000_000
RECORDS_OF_CALLS: Final = frozenset(
    {"agent", "collectives", "collective-wrappers", "event-file"}
    | {"functional-collectives", "process-groups"}
)
"""Without one of these a rank may have made calls that nobody wrote down."""

_MOST_SITES: Final = 4096
"""Of so many places of the program it is counted how often a rank called there."""

_LEFT: Final = {RankStatus.FINISHED, RankStatus.RAISED, RankStatus.DIED}


class RankTracker:
    """The mutable side of a `RankState`."""

    def __init__(self, rank: int, window_s: float | None = None) -> None:
        """Know nothing of the rank yet; so far back it counts what the rank used, in seconds."""
        self.rank = rank
        self._window_ns = int(max(SHORTEST_WINDOW_S, window_s or WINDOW_S) * 1e9)
        self.status = RankStatus.SILENT
        self.is_unseen = False
        self.has_agent = True
        self.is_time_assumed = False
        self.progress_ns = 0
        self.left_ns = 0
        self.left_hang = False
        self.is_over = False
        self._has_just_left = False
        self.incomplete = ""
        self.label = ""
        self._has_own_events = False
        self.last_call: Collective | None = None
        self.last_call_state = ""
        self.stacks: Stacks | None = None
        self._observed: dict[str, Observed] = {}
        self._reached: dict[str, GroupProgress] = {}
        self._heartbeat: Heartbeat | None = None
        self._beats: deque[tuple[int, Heartbeat]] = deque()
        self._started: RankStarted | None = None
        self._raised: Raised | None = None
        self._finished: Finished | None = None
        self._exited: Exited | None = None
        self._signalled: Signalled | None = None
        self._exit_status: int | None = None
        self._lost: NodeLost | None = None
        self._torch = ""
        self._creates_group = False
        self._step = 0
        self._step_durations: deque[float] = deque(maxlen=50)
        self._recent: deque[Collective] = deque(maxlen=RECENT)
        self._site_counts: Recent[CallSite, int] = Recent(_MOST_SITES)
        self._asked: StoreAsked | None = None
        self._published: deque[StoreCall] = deque(maxlen=RECENT)
        self._made: deque[FileAccess] = deque(maxlen=RECENT)
        self._dead_children: deque[ChildEnded] = deque(maxlen=RECENT)

    @property
    def has_left(self) -> bool:
        """The rank finished, raised or died."""
        return self.status in _LEFT

    @property
    def median_step_s(self) -> float:
        """The median duration of its last steps in seconds, 0 before the first."""
        return median(self._step_durations) if self._step_durations else 0.0

    @property
    def is_inside_call(self) -> bool:
        """The rank's host is in a collective, or creates or destroys a process group."""
        call = self.last_call
        is_blocked = call is not None and not call.is_async
        return self._creates_group or (
            is_blocked and self.last_call_state in ("scheduled", "issued")
        )

    def look(self, now_ns: int, *, is_seen: bool) -> None:
        """Let time pass; a rank that cannot be seen now does not count as standing still."""
        self.is_unseen = not (is_seen and self.has_agent)
        has_just_left, self._has_just_left = self._has_just_left, False
        if self.is_unseen or has_just_left or not self.progress_ns:
            self.progress_ns = now_ns

    def feed(self, event: Event, now_ns: int) -> None:
        """Take in one event of this rank."""
        # The monitor speaks of a rank that never came, too: only its own events are its life.
        outside = (
            Stacks
            | Observed
            | FaultLogged
            | ProbeDisabled
            | NodeLost
            | ProcessNamed
            | SourceSeen
            | NodeClock
        )
        if not isinstance(event, outside):
            self._live(now_ns)
        self._lost = event if isinstance(event, NodeLost) else self._lost
        self._has_own_events |= event.seq >= 0
        self.label = event.label if isinstance(event, ProcessNamed) else self.label
        self._step = max(self._step, event.step)
        match event:
            case Collective():
                self.last_call, self.last_call_state = event, "scheduled"
                self._recent.append(event)
                self._site_counts[event.site] = self._site_counts.of(event.site, int) + 1
                self._progress(now_ns)
            case CollectiveState():
                if self.last_call is not None and event.call == self.last_call.seq:
                    self.last_call_state = event.state
                if event.state != "failed":  # that is the end of a wait, and not of what it was for
                    self._progress(now_ns)
            case Heartbeat():
                self._beat(event, now_ns)
            case StepEnd():
                self._step_durations.append(event.duration_s)
                self._step = max(self._step, event.step + 1)
                self._progress(now_ns)
            case GroupCreated():
                self._creates_group = not event.done
                self._progress(now_ns)
            case TorchLoaded():
                self._torch = event.torch
            case _:
                self._feed_rare(event, now_ns)

    def _live(self, now_ns: int) -> None:
        self._lost = None
        if self.status is RankStatus.SILENT:
            self.status, self.progress_ns = RankStatus.RUNNING, now_ns

    def _feed_rare(self, event: Event, now_ns: int) -> None:
        match event:
            case RankStarted():
                self._started = event
                self._progress(now_ns)
            case Raised() if event.thread == "MainThread":
                self._raised = event
                self._leave(RankStatus.RAISED, event.time_ns)
            case Finished():
                self._finished, self._exit_status = event, event.exit_status
                self._leave(RankStatus.FINISHED, event.time_ns)
            case Exited():
                self._exited = _fuller(self._exited, event)
                status = self._exited.status
                self._exit_status = status if self._finished is None else self._exit_status
                self._leave(RankStatus.DIED, event.time_ns)
            case Signalled():
                self._signalled = event
            case ProbeDisabled() if event.probe in RECORDS_OF_CALLS:
                self.incomplete = self.incomplete or f"{event.probe}: {event.reason}"
                self.has_agent = self.has_agent and event.probe != "agent"
            case _:
                self._see(event)

    def _see(self, event: Event) -> None:
        """Take in what others tell of the rank."""
        match event:
            case Stacks(is_native=False):
                if self.stacks is None or not event.error:  # what was once seen is kept
                    self.stacks = event
            case _:
                self._feed_sign(event)

    def _feed_sign(self, event: Event) -> None:
        """Take in what tells what the rank waits for."""
        match event:
            case Observed():
                self._observed[event.source] = event
            case GroupProgress():
                self._reached[event.group.name] = event
            case EventsLost():
                self._creates_group, self._asked, self.last_call = False, None, None
            case ChildEnded():
                self._dead_children.append(event)
            case FileAccess() if event.action in MAKING:
                self._made.append(event)
            case StoreAsked(thread="MainThread"):
                self._asked = event
            case StoreCall(done=False):
                self._published.append(event)
            case StoreCall() if self._asked is not None and event.keys == self._asked.keys:
                self._asked = None

    def _leave(self, status: RankStatus, time_ns: int) -> None:
        # A rank that raised or finished also exits: the first is what happened to it.
        if not self.has_left:
            self.status, self.left_ns = status, time_ns
            self._has_just_left = True

    def _progress(self, now_ns: int) -> None:
        self.progress_ns = now_ns
        self._beats.clear()
        if self._heartbeat is not None:
            self._beats.append((now_ns, self._heartbeat))

    def _beat(self, event: Heartbeat, now_ns: int) -> None:
        before, self._heartbeat = self._heartbeat, event
        if before is None or _counters(before) != _counters(event):
            self._progress(now_ns)
        beats = self._beats
        if not beats or now_ns - beats[-1][0] >= self._window_ns // BEATS_PER_WINDOW:
            beats.append((now_ns, event))
        while len(beats) > 1 and now_ns - beats[1][0] >= self._window_ns:
            beats.popleft()

    def _is_working(self, now_ns: int) -> bool:
        if not self._beats or self._heartbeat is None:
            return False
        first_ns, first = self._beats[0]
        used_s = self._heartbeat.cpu_s - first.cpu_s
        return now_ns > first_ns and used_s >= BUSY_SHARE * (now_ns - first_ns) / 1e9

    def _help(self, idle_s: float) -> Help | None:
        """Return what is done for the rank, if it is enough for it to go on one day."""
        looks = [(at, beat) for at, beat in self._beats if beat.children_cpu_s is not None]
        if len(looks) < 2 or idle_s > HELP_PATIENCE_S or self.is_inside_call:
            return None
        seconds = (looks[-1][0] - looks[0][0]) / 1e9
        used = _increase(beat.children_cpu_s or 0.0 for _, beat in looks)
        moved = _increase(beat.io_bytes for _, beat in looks)
        is_enough = used >= CHILDREN_SHARE * seconds or moved >= IO_PER_S * seconds
        if seconds < HELP_LEAST_S or not is_enough:
            return None
        num_children = max(beat.num_children for _, beat in looks)
        return Help(seconds, used, num_children, int(moved))

    def state(self, now_ns: int, waiting: tuple[Collective, ...] = ()) -> RankState:
        """Return what is known now; `waiting` are its calls that wait for another rank."""
        beat = self._heartbeat
        idle_s = max(0, now_ns - self.progress_ns) / 1e9
        here = not self.has_left
        return RankState(
            rank=self.rank,
            status=self.status,
            phase=beat.phase if beat else Phase.STARTING,
            step=self._step,
            num_batches=beat.num_batches if beat else 0,
            num_backwards=beat.num_backwards if beat else 0,
            idle_s=idle_s,
            is_working=here and not waiting and self._is_working(now_ns),
            help=self._help(idle_s) if here and not waiting else None,
            gil_held=here and not self.is_unseen and _is_silent(beat, now_ns),
            incomplete=self.incomplete,
            label=self.label,
            is_reported_only=not self._has_own_events,
            left_ns=self.left_ns,
            left_hang=self.left_hang,
            started=self._started,
            raised=self._raised,
            finished=self._finished,
            exited=self._exited,
            exit_status=self._exit_status,
            is_over=self.is_over,
            lost=self._lost,
            signalled=self._signalled,
            last_call=self.last_call,
            last_call_state=self.last_call_state,
            recent=tuple(self._recent),
            waiting=waiting,
            site_counts=MappingProxyType(self._site_counts),
            stacks=self.stacks,
            torch=self._torch,
            observed=MappingProxyType(self._observed),
            progress=MappingProxyType(self._reached),
            is_idle_assumed=self.is_time_assumed,
            asked=self._asked,
            published=tuple(self._published),
            made=tuple(self._made),
            dead_children=tuple(self._dead_children),
        )


class RankStates(Mapping[int, RankState]):
    """The states of all ranks at one moment, each made when it is first asked for."""

    def __init__(
        self,
        trackers: Mapping[int, RankTracker],
        waiting: Callable[[int], tuple[Collective, ...]],
        now_ns: int,
    ) -> None:
        """Look at these trackers; `waiting` returns the calls of a rank that wait for another."""
        self._trackers = trackers
        self._waiting = waiting
        self._now_ns = now_ns
        self._made: dict[int, RankState] = {}

    def __getitem__(self, rank: int) -> RankState:
        if rank not in self._made:
            self._made[rank] = self._trackers[rank].state(self._now_ns, self._waiting(rank))
        return self._made[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._trackers)

    def __len__(self) -> int:
        return len(self._trackers)


def _fuller(known: Exited | None, event: Exited) -> Exited:
    """Return what says more of one end, where a launcher and a scheduler both have seen it."""
    if known is None or not (known.cause or event.status is None):
        return event
    return known


def _is_silent(beat: Heartbeat | None, now_ns: int) -> bool:
    return beat is not None and now_ns - beat.beat_ns > GIL_SILENCE_NS


def _increase(values: Iterable[float]) -> float:
    """Return by how much a counter grew; what children used may vanish with them."""
    return sum(max(0.0, after - before) for before, after in pairwise(values))


def _counters(beat: Heartbeat) -> tuple[object, ...]:
    return (beat.step, beat.num_batches, beat.num_backwards, beat.phase)
