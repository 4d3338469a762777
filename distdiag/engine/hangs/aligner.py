"""Aligns the calls by which ranks wait for one another, and finds those that cannot end."""

from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.engine.collectives.calls import (
    CollectiveAlignment,
    CollectiveStreams,
    GroupCalls,
    GroupStream,
    Messages,
)
from distdiag.engine.hangs.stall import IDLE_JOB_PATIENCE, SAME_CALL_PATIENCE, Candidate, Stall
from distdiag.engine.hangs.waits import (
    CYCLE_IDLE_S,
    AnyAlignment,
    Contradictions,
    Wait,
    cannot_come,
    closure,
    in_cycle,
    works,
)
from distdiag.events.base import Event
from distdiag.events.collectives import (
    BufferChanged,
    Collective,
    CollectiveState,
    GroupCreated,
    GroupProgress,
)
from distdiag.events.lifecycle import (
    EventsLost,
    Exited,
    Finished,
    NodeLost,
    ProbeDisabled,
    Raised,
    RankStarted,
)
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import Evidence
from distdiag.views.alignment import (
    CollectiveView,
    GroupView,
    OpenCollective,
    OpenGroup,
    Trigger,
)
from distdiag.views.base import View
from distdiag.views.rank_states import (
    JobView,
    LaunchView,
    RankStatus,
    StackView,
    States,
    WorkView,
)

_LEAVING: Final = (Finished, Raised, Exited, NodeLost)
_OF_CALLS: Final = (CollectiveView, OpenCollective, WorkView)
_NO_CALL: Final = NothingThere("collectives", "no collective was called")
_NO_GROUP: Final = NothingThere("process groups", "no creation of a process group was seen")
_NO_STACKS: Final = NothingThere("hangs", "no stacks of ranks were taken")

_MAIN: Final = "MainThread"

MOST_NATIVE_FRAMES: Final = 12
"""The innermost ones tell what a rank waits for; the rest is the interpreter's."""

Shown = Generator[View, bool, None]
"""Views; what a ``yield`` returns says whether a check found something of warning or above."""


class CallAligner(Aligner):
    """Collectives, messages and creations of groups, and from time to time the job as a whole.

    When `wanted` is not empty, the stacks of those ranks are wanted as `Stacks` events (with
    `error` where there are none).
    """

    needs = (
        Collective,
        CollectiveState,
        BufferChanged,
        GroupCreated,
        GroupProgress,
        Stacks,
        EventsLost,
        ProbeDisabled,
        RankStarted,
        *_LEAVING,
    )
    builds = (
        CollectiveView,
        OpenCollective,
        GroupView,
        OpenGroup,
        WorkView,
        LaunchView,
        JobView,
        StackView,
    )

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.stall = Stall(job.hang_timeout_s)
        self._streams = CollectiveStreams(job.world)
        self._messages = Messages(job.world)
        self._groups = GroupCalls(job.world)
        self._contradictions = Contradictions()
        self._shown: set[tuple[object, ...]] = set()
        self._alarmed: set[tuple[object, ...]] = set()
        self._open_alarms: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
        self._now_ns = 0
        self._has_left = False
        self._has_just_failed = False
        self._has_called = False
        self._has_group = False
        self._has_stacks = False

    @property
    def is_hung(self) -> bool:
        """Whether the job stands still, for a reason that a finding of warning or above names."""
        return self.stall.is_hang

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether no rank has called another one, and whether nobody asked where they are."""
        gaps: dict[type[View | Event], Gap] = {}
        if not self._has_group:
            gaps |= dict.fromkeys((GroupView, OpenGroup), _NO_GROUP)
        if not (self._has_called or self._has_group):
            gaps |= dict.fromkeys(_OF_CALLS, _NO_CALL)
        if not self._has_stacks:
            gaps[StackView] = _NO_STACKS
        return gaps

    def waiting(self, rank: int) -> tuple[Collective, ...]:
        """Return the calls of a rank that wait for another rank, the oldest first."""
        calls = [call for stream in self._streams.all() for call in stream.waiting(rank)]
        calls += self._messages.waiting(rank)
        return tuple(sorted(calls, key=lambda call: call.seq))

    # What goes in

    def feed(self, event: Event) -> Shown:
        """Take in one event of one rank."""
        match event:
            case Collective():
                self._has_called = True
                yield from self._feed_call(event)
            case GroupProgress():
                yield from self._feed_progress(event)
            case CollectiveState(state="dropped") | BufferChanged():
                yield WorkView(event, self.job.states()[event.rank].recent)
            case GroupCreated():
                self._has_group = True
                yield from self._feed_group_call(event)
                yield LaunchView(event, self.job.states())
            case RankStarted():
                yield LaunchView(event, self.job.states())
            case Stacks():
                self._feed_stacks(event)
            case ProbeDisabled(probe="agent") if self._is_silent(event.rank):
                yield from self._leave_out(event.rank)
            case _:
                self._feed_rare(event)

    def _feed_rare(self, event: Event) -> None:
        if isinstance(event, EventsLost):
            self._streams.lose(event.rank)
            # Which of them belong together is counted, and not written with each.
            for counted in (self._messages, self._groups):
                counted.leave_out(event.rank)
        if isinstance(event, _LEAVING):
            self._has_left = True
            self._has_just_failed |= not isinstance(event, Finished) or event.exit_status != 0

    def _leave_out(self, rank: int) -> Shown:
        """Expect nothing of a rank that runs unobserved, which may be told after its peers came."""
        for calls in (self._streams, self._messages, self._groups):
            calls.leave_out(rank)
        for stream in self._streams.all():
            for alignment in stream.leave_out(rank) if rank in stream.ranks else ():
                yield from self._show_whole(stream, alignment)

    def _feed_stacks(self, stacks: Stacks) -> None:
        if stacks.is_native:
            self.job.store.support(_native_frames(stacks))
            return
        self._has_stacks |= not stacks.error
        self.stall.got_stacks(stacks.rank)

    def _feed_progress(self, progress: GroupProgress) -> Shown:
        stream = self._streams.stream(progress.group)
        for alignment in stream.advance(progress):
            yield from self._show_whole(stream, alignment)

    def _is_silent(self, rank: int) -> bool:
        return self.job.trackers[rank].status is RankStatus.SILENT

    def _feed_call(self, call: Collective) -> Shown:
        if call.collective_seq_id < 0:
            pair = self._messages.add(call)
            if pair is not None:
                yield pair.show_as(CollectiveView, self.job.states())
            return
        stream = self._streams.stream(call.group)
        alignment = stream.add(call)
        if alignment is not None:
            yield from self._show_whole(stream, alignment)

    def _show_whole(self, stream: GroupStream, alignment: CollectiveAlignment) -> Shown:
        found = yield alignment.show_as(CollectiveView, self.job.states())
        ops = {other.signature.op for other in alignment.by_rank.values()}
        unlike = found and not self._streams.same_place(alignment)
        # From here on the ranks' calls are paired wrongly: the rest would be consequences.
        stream.broken = len(ops) > 1 or unlike
        if found:
            self._contradictions.add(alignment)
        if stream.broken:
            self._doubt_order(alignment)

    def _feed_group_call(self, call: GroupCreated) -> Shown:
        alignment = self._groups.add(call)
        if alignment is not None:
            yield alignment.show_as(GroupView, self.job.states())
            if self._groups.is_broken:
                self._doubt_order(alignment)

    def _doubt_order(self, alignment: AnyAlignment) -> None:
        self.job.order.doubt(min(event.time_ns for event in alignment.by_rank.values()))

    def tick(self, now_ns: int, unseen: Collection[int]) -> Shown:
        """Let time pass: look at ranks that left, at cycles and at stalls."""
        self._now_ns = now_ns
        if not self.stall.due(now_ns) or not (self._has_left or self._is_anyone_idle()):
            return
        waits, states = self._waits(), self.job.states()
        # Others may have failed alike since the events were read: the next poll shows.
        has_just_failed, self._has_just_failed = self._has_just_failed, False
        if self._has_left and not has_just_failed:
            yield from self._show_left(waits, states)
        circles: list[Candidate] = []
        yield from self._show_cycles(waits, states, circles)
        yield from self._look_for_stall(waits, states, circles)

    def _is_anyone_idle(self) -> bool:
        since_ns = self._now_ns - int(CYCLE_IDLE_S * 1e9)
        progress = (tracker.progress_ns for tracker in self.job.trackers.values())
        return bool(self.stall.ranks) or min(progress) <= since_ns

    def end(self) -> Shown:
        """Show what is incomplete at the end of the run."""
        for tracker in self.job.trackers.values():
            tracker.is_over = True
        waits, states = self._waits(), self.job.states()
        self._withdraw_ended(waits)
        if all(states[rank].left_ns for rank in self.stall.ranks if rank in states):
            self._update_stall([], states)
        yield from self._show_left(waits, states)
        for wait in waits:
            if any(not states[rank].incomplete for rank in wait.awaited if rank in states):
                yield from self._show_open(wait.alignment, Trigger.ENDED, states)
        yield from _job(states)
        if not self.job.store.alarms() and any(state.has_failed for state in states.values()):
            yield JobView(states, is_unexplained=True)

    # What is shown

    def _waits(self) -> list[Wait]:
        # A group that not all ranks create comes before the calls that are made meanwhile.
        opened: list[AnyAlignment] = [*self._groups.unmatched()]
        opened += [a for stream in self._streams.all() if (a := stream.first_open())]
        opened += self._messages.unmatched()
        return [Wait(alignment) for alignment in opened]

    def _show_left(self, waits: list[Wait], states: States) -> Shown:
        for wait in waits:
            if cannot_come(wait.alignment, states):
                yield from self._show_open(wait.alignment, Trigger.LEFT, states)
        if any(state.has_failed or state.lost is not None for state in states.values()):
            yield from _job(states)

    def _show_cycles(
        self,
        waits: list[Wait],
        states: States,
        circles: list[Candidate],
        *,
        is_stalled: bool = False,
    ) -> Shown:
        """Show ranks that wait for one another; add to `circles` whom that keeps for ever."""
        cyclic = [w for w in waits if in_cycle(w, waits, states, is_stalled=is_stalled)]
        if not cyclic:
            return
        circle = closure(cyclic[0], waits)
        for other in (closure(wait, waits) for wait in cyclic):
            circle |= other if other & circle else frozenset()
        # The waits of one circle are the same fault seen from its ranks: one of them explains it.
        for wait in cyclic:
            if closure(wait, waits) <= circle:
                yield from self._show_open(wait.alignment, Trigger.CYCLE, states)
                if wait.alignment.identity in self._alarmed:
                    break
        around = {w.alignment.identity for w in waits if closure(w, waits) <= circle}
        self._shown |= around
        if not (around.isdisjoint(self._alarmed) or _is_any_incomplete(circle, states)):
            circles.append(Candidate(circle, is_deadlock=True))

    def _look_for_stall(
        self, waits: list[Wait], states: States, candidates: list[Candidate]
    ) -> Shown:
        self._withdraw_ended(waits)
        is_broken = self._groups.is_broken or any(s.broken for s in self._streams.all())
        held = self._contradictions.blocking(states)
        candidates = [*candidates, *(Candidate(ranks, is_deadlock=True) for ranks in held)]
        candidates += [Candidate(closure(wait, waits)) for wait in waits]
        candidates += self._whole_job(is_broken=is_broken)
        self._update_stall(candidates, states)
        if not self.stall.is_ready(self._now_ns):
            return
        store = self.job.store
        alarms, shown = store.alarms(), set(self._shown)
        standing = [w for w in waits if w.everyone <= self.stall.ranks]
        yield from self._show_cycles(standing, states, [], is_stalled=True)
        for wait in waits:
            if closure(wait, waits) <= self.stall.ranks:
                yield from self._show_open(wait.alignment, Trigger.STALLED, states)
        alarmed = [wait for wait in waits if wait.alignment.identity in self._alarmed]
        if not (is_broken or alarmed):
            yield from _job(states)
        is_explained = is_broken or any(
            closure(wait, waits) <= self.stall.ranks for wait in alarmed
        )
        now_alarms = store.alarms()
        found = now_alarms - alarms
        # What was said before explains it, too, unless it is but a rank that is late.
        is_late = any(works(states[rank]) for rank in self.stall.ranks if rank in states)
        is_hang = bool(found) or is_explained or (bool(now_alarms) and not is_late)
        self.stall.declare(found, self._shown - shown, states, is_hang=is_hang)

    def _update_stall(self, candidates: list[Candidate], states: States) -> None:
        medians = [tracker.median_step_s for tracker in self.job.trackers.values()]
        again = self.stall.update(candidates, states, max(medians, default=0.0))
        self._shown -= again
        self._alarmed -= again
        self.job.store.withdraw(self.stall.take_recovered())

    def _withdraw_ended(self, waits: list[Wait]) -> None:
        """Take back what was said of waits that have ended: whoever was missing has come."""
        still_open = {wait.alignment.identity for wait in waits}
        ended = self._open_alarms.keys() - still_open
        if self._groups.is_broken or any(stream.broken for stream in self._streams.all()):
            return  # calls that are paired wrongly are not followed: they may be open still
        for identity in ended:
            self.job.store.withdraw(self._open_alarms.pop(identity))

    def _whole_job(self, *, is_broken: bool) -> list[Candidate]:
        """Return all ranks, since it counts when nobody moves though nobody waits for a peer."""
        world = frozenset(self.job.world)
        if is_broken or self.stall.is_explicit:
            # Calls that contradict one another do not end: whoever is busy waits for a GPU.
            return [Candidate(world, may_work=not is_broken)]
        here = [tracker for tracker in self.job.trackers.values() if not tracker.has_left]
        if here and all(tracker.is_inside_call for tracker in here):
            return [Candidate(world, SAME_CALL_PATIENCE)]
        # One process alone may be a server that waits for requests.
        return [Candidate(world, IDLE_JOB_PATIENCE)] if len(here) > 1 else []

    def _show_open(self, alignment: AnyAlignment, trigger: Trigger, states: States) -> Shown:
        is_consequence = self._groups.is_broken and alignment.kind != "group"
        if is_consequence or alignment.identity in self._shown:
            return
        self._shown.add(alignment.identity)
        before = self.job.store.alarms()
        kind = OpenGroup if alignment.kind == "group" else OpenCollective
        if (yield alignment.show_as(kind, states, trigger)):
            self._alarmed.add(alignment.identity)
            found = self.job.store.alarms() - before
            self._open_alarms.setdefault(alignment.identity, set()).update(found)


def _job(states: States) -> Shown:
    yield JobView(states)
    if any(state.stacks is not None for state in states.values()):
        yield StackView(states)


def _is_any_incomplete(ranks: Iterable[int], states: States) -> bool:
    return any(states[rank].incomplete for rank in ranks if rank in states)


def _native_frames(stacks: Stacks) -> Evidence:
    return Evidence(ranks=RankSet([stacks.rank]), summary=f"native frames: {_main_frames(stacks)}")


def _main_frames(stacks: Stacks) -> str:
    if stacks.error:
        return f"nothing could be seen: {stacks.error}"
    main = [thread for thread in stacks.threads if thread.name == _MAIN]
    frames = next(iter(main or stacks.threads)).frames
    more = " < …" if len(frames) > MOST_NATIVE_FRAMES else ""
    return " < ".join(frame.function for frame in frames[:MOST_NATIVE_FRAMES]) + more
