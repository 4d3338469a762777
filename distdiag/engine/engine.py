"""The engine: events in, findings out. It neither reads a clock nor waits for anything."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from distdiag.checks.base import Check
from distdiag.config.placement_rules import PlacementRule
from distdiag.engine.collectives.calls import CollectiveStreams, GroupCalls, Messages
from distdiag.engine.coverage import UnobservedRanks
from distdiag.engine.files.aligner import FileWatch
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
from distdiag.engine.models.aligner import ModelEvent
from distdiag.engine.ranks import RankStates, RankTracker
from distdiag.engine.runner import Judges
from distdiag.engine.wiring import all_watches
from distdiag.events.base import Event
from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.files import FileAccess
from distdiag.events.lifecycle import Exited, Finished, NodeLost, ProbeDisabled, Raised
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import Finding
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import Fate, RankState

_log = logging.getLogger(__name__)

_LEAVING: Final = (Finished, Raised, Exited, NodeLost)


class Engine:
    """Align the events of all ranks and let the checks judge them.

    Feed events as they come, call `tick` with the time at every poll, and `finish` at the end.
    `findings` holds the conclusions at any moment. When `evidence_wanted` is not empty, the
    stacks of those ranks are wanted as `Stacks` events (with `error` where there are none).
    """

    def __init__(
        self,
        checks: Iterable[Check],
        world: RankSet,
        *,
        hang_timeout_s: float | None = None,
        rules: Sequence[PlacementRule] = (),
        only_start: bool = False,
    ) -> None:
        """Prepare to judge a run of these ranks.

        `hang_timeout_s` is the threshold in seconds that the user set; None lets the duration of
        the steps decide. `rules` are the user's own plan of how tensors are sharded. `only_start`:
        the ranks do not look at the steps of their models.
        """
        self.world = world
        self._judges = Judges(checks)
        self._conclusions = self._judges.conclusions
        self._trackers = {rank: RankTracker(rank, hang_timeout_s) for rank in world}
        self._streams = CollectiveStreams(world)
        self._messages = Messages(world)
        self._groups = GroupCalls(world)
        self._stall = Stall(hang_timeout_s)
        self._unobserved = UnobservedRanks(world)
        self._contradictions = Contradictions()
        watches_files = len(world) > 1 and bool(self._judges.needing(FileAccess))
        self._files = FileWatch(world) if watches_files else None
        self._watches = all_watches(world, self._judges, rules, only_start=only_start)
        self._shown: set[tuple[object, ...]] = set()
        self._alarmed: set[tuple[object, ...]] = set()
        self._open_alarms: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
        self._now_ns = 0
        self._has_left = False
        self._has_just_failed = False

    # What came out

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The conclusions so far, in the order in which they were drawn."""
        return self._conclusions.all()

    def take_withdrawn(self) -> list[Finding]:
        """Return what was taken back since the last call, as the notes that are left of it."""
        return self._conclusions.take_withdrawn()

    @property
    def evidence_wanted(self) -> RankSet:
        """The ranks whose stacks should be dumped now."""
        return RankSet(self._stall.wanted)

    @property
    def is_hung(self) -> bool:
        """Whether the job stands still, for a reason that a finding of warning or above names."""
        return self._stall.is_hang

    @property
    def evidence_s(self) -> float:
        """How long taking the wanted stacks may last, in seconds, where somebody waits for them."""
        return self._stall.evidence_s

    @property
    def checked(self) -> tuple[str, ...]:
        """The codes of the checks that judged the run."""
        return self._judges.codes

    @property
    def not_checked(self) -> dict[str, str]:
        """The codes of the checks that were disabled or did not see all, and why."""
        problem = self._files.problem if self._files is not None else ""
        unseen = {check.code: problem for check in self._judges.needing(FileAccess) if problem}
        alone = self._unobserved.reason
        compared = {code: alone for code in self._judges.comparing} if alone else {}
        return unseen | self._watches.not_checked | compared | self._judges.disabled

    @property
    def unobserved(self) -> RankSet:
        """The ranks of the job of which nothing is read, since nobody told of them at the start."""
        return self._unobserved.ranks

    def states(self) -> Mapping[int, RankState]:
        """Return what is known of every rank now."""
        return RankStates(self._trackers, self._waiting, self._now_ns)

    # What goes in

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        tracker = self._trackers.get(event.rank)
        if tracker is None:
            _log.warning("event of rank %d, which is not in the world %s", event.rank, self.world)
            return
        if isinstance(event, Exited) and self.is_hung:
            tracker.left_hang = True
        tracker.feed(event, self._now_ns)
        match event:
            case Collective():
                self._feed_call(event)
            case GroupCreated():
                self._feed_group_call(event)
            case Stacks():
                self._stall.got_stacks(event.rank)
            case ProbeDisabled(probe="agent") if tracker.fate is Fate.SILENT:
                for calls in (self._streams, self._messages, self._groups):
                    calls.leave_out(event.rank)
        if isinstance(event, _LEAVING):
            self._has_left = True
            self._has_just_failed |= not isinstance(event, Finished) or event.exit_status != 0
        self._unobserved.feed(event)
        self._watches.feed(event)
        if self._files is not None and not isinstance(event, ModelEvent):
            self._files.feed(event)
        self._judges.judge_event(event, self.states)

    def _feed_call(self, call: Collective) -> None:
        if call.collective_seq_id < 0:
            self._judge(self._messages.add(call))
            return
        stream = self._streams.stream(call.group)
        alignment = stream.add(call)
        found = self._judge(alignment)
        if alignment is None:
            return
        ops = {other.signature.op for other in alignment.by_rank.values()}
        unlike = found and not self._streams.same_place(alignment)
        # From here on the ranks' calls are paired wrongly: the rest would be consequences.
        stream.broken = len(ops) > 1 or unlike
        if found:
            self._contradictions.add(alignment)
        if stream.broken:
            self._doubt_order(alignment)

    def _feed_group_call(self, call: GroupCreated) -> None:
        alignment = self._groups.add(call)
        self._judge(alignment)
        if self._groups.is_broken:
            self._doubt_order(alignment)

    def _doubt_order(self, alignment: AnyAlignment | None) -> None:
        if alignment is not None and self._files is not None:
            self._files.doubt(min(event.time_ns for event in alignment.by_rank.values()))

    def tick(self, now_ns: int, unseen: Collection[int] = ()) -> None:
        """Let time pass: judge ranks that left, cycles and stalls.

        Nothing can be heard now of the ranks in `unseen`, so they do not count as standing still.
        """
        self._now_ns = now_ns
        if self._files is not None:
            self._files.advance(now_ns, unseen)
            self._judge_files(self._files)
        for tracker in self._trackers.values():
            tracker.look(now_ns, is_seen=tracker.rank not in unseen)
        if not self._stall.due(now_ns) or not (self._has_left or self._is_anyone_idle()):
            return
        waits, states = self._waits(), self.states()
        # Others may have failed alike since the events were read: the next look tells.
        has_just_failed, self._has_just_failed = self._has_just_failed, False
        if self._has_left and not has_just_failed:
            self._judge_left(waits, states)
        circles = self._judge_cycles(waits, states)
        self._judge_stall(waits, states, circles)

    def _is_anyone_idle(self) -> bool:
        since_ns = self._now_ns - int(CYCLE_IDLE_S * 1e9)
        progress = (tracker.progress_ns for tracker in self._trackers.values())
        return bool(self._stall.ranks) or min(progress) <= since_ns

    def finish(self) -> None:
        """Judge what is incomplete at the end of the run."""
        if self._files is not None:
            self._files.finish()
            self._judge_files(self._files)
        self._watches.finish()
        for tracker in self._trackers.values():
            tracker.is_over = True
        waits, states = self._waits(), self.states()
        self._withdraw_ended(waits)
        if all(states[rank].left_ns for rank in self._stall.ranks if rank in states):
            self._update_stall([], states)
        self._judge_left(waits, states)
        for wait in waits:
            if any(not states[rank].incomplete for rank in wait.awaited if rank in states):
                self._judge_missing(wait.alignment, Trigger.ENDED, states)
        self._judges.judge_ranks(states)

    # Judging

    def _waits(self) -> list[Wait]:
        # A group that not all ranks create comes before the calls that are made meanwhile.
        opened: list[AnyAlignment] = [*self._groups.unmatched()]
        opened += [a for stream in self._streams.all() if (a := stream.first_open())]
        opened += self._messages.unmatched()
        return [Wait(alignment) for alignment in opened]

    def _waiting(self, rank: int) -> tuple[Collective, ...]:
        calls = [call for stream in self._streams.all() for call in stream.waiting(rank)]
        calls += self._messages.waiting(rank)
        return tuple(sorted(calls, key=lambda call: call.seq))

    def _judge_left(self, waits: list[Wait], states: Mapping[int, RankState]) -> None:
        for wait in waits:
            if cannot_come(wait.alignment, states):
                self._judge_missing(wait.alignment, Trigger.LEFT, states)
        if any(state.has_failed or state.lost is not None for state in states.values()):
            self._judges.judge_ranks(states)

    def _judge_cycles(
        self, waits: list[Wait], states: Mapping[int, RankState], is_stalled: bool = False
    ) -> list[Candidate]:
        """Judge ranks that wait for one another; return whom that keeps from ever going on."""
        cyclic = [w for w in waits if in_cycle(w, waits, states, is_stalled=is_stalled)]
        if not cyclic:
            return []
        circle = closure(cyclic[0], waits)
        for other in (closure(wait, waits) for wait in cyclic):
            circle |= other if other & circle else frozenset()
        # The waits of one circle are the same fault seen from its ranks: one of them explains it.
        for wait in cyclic:
            if closure(wait, waits) <= circle:
                self._judge_missing(wait.alignment, Trigger.CYCLE, states)
                if wait.alignment.identity in self._alarmed:
                    break
        around = {w.alignment.identity for w in waits if closure(w, waits) <= circle}
        self._shown |= around
        is_proven = not (around.isdisjoint(self._alarmed) or _is_any_incomplete(circle, states))
        return [Candidate(circle, is_deadlock=True)] if is_proven else []

    def _judge_stall(
        self, waits: list[Wait], states: Mapping[int, RankState], candidates: list[Candidate]
    ) -> None:
        self._withdraw_ended(waits)
        is_broken = self._groups.is_broken or any(s.broken for s in self._streams.all())
        held = self._contradictions.blocking(states)
        candidates = [*candidates, *(Candidate(ranks, is_deadlock=True) for ranks in held)]
        candidates += [Candidate(closure(wait, waits)) for wait in waits]
        candidates += self._whole_job(is_broken=is_broken)
        self._update_stall(candidates, states)
        if not self._stall.is_ready(self._now_ns):
            return
        alarms, shown = self._conclusions.alarms(), set(self._shown)
        self._judge_cycles([w for w in waits if w.everyone <= self._stall.ranks], states, True)
        for wait in waits:
            if closure(wait, waits) <= self._stall.ranks:
                self._judge_missing(wait.alignment, Trigger.STALLED, states)
        alarmed = [wait for wait in waits if wait.alignment.identity in self._alarmed]
        if not (is_broken or alarmed):
            self._judges.judge_ranks(states)
        is_explained = is_broken or any(
            closure(wait, waits) <= self._stall.ranks for wait in alarmed
        )
        now_alarms = self._conclusions.alarms()
        found = now_alarms - alarms
        # What was said before explains it, too, unless it is but a rank that is late.
        is_late = any(works(states[rank]) for rank in self._stall.ranks if rank in states)
        is_hang = bool(found) or is_explained or (bool(now_alarms) and not is_late)
        self._stall.declare(found, self._shown - shown, states, is_hang=is_hang)

    def _update_stall(self, candidates: list[Candidate], states: Mapping[int, RankState]) -> None:
        medians = [tracker.median_step_s for tracker in self._trackers.values()]
        again = self._stall.update(candidates, states, max(medians, default=0.0))
        self._shown -= again
        self._alarmed -= again
        self._conclusions.withdraw(self._stall.take_recovered())

    def _withdraw_ended(self, waits: list[Wait]) -> None:
        """Take back what was said of waits that have ended: whoever was missing has come."""
        still_open = {wait.alignment.identity for wait in waits}
        ended = self._open_alarms.keys() - still_open
        if self._groups.is_broken or any(stream.broken for stream in self._streams.all()):
            return  # calls that are paired wrongly are not followed: they may be open still
        for identity in ended:
            self._conclusions.withdraw(self._open_alarms.pop(identity))

    def _whole_job(self, *, is_broken: bool) -> list[Candidate]:
        """Return all ranks, since it counts when nobody moves though nobody waits for a peer."""
        world = frozenset(self.world)
        if is_broken or self._stall.is_explicit:
            # Calls that contradict one another do not end: whoever is busy waits for a GPU.
            return [Candidate(world, may_work=not is_broken)]
        here = [tracker for tracker in self._trackers.values() if not tracker.has_left]
        if here and all(tracker.is_inside_call for tracker in here):
            return [Candidate(world, SAME_CALL_PATIENCE)]
        # One process alone may be a server that waits for requests.
        return [Candidate(world, IDLE_JOB_PATIENCE)] if len(here) > 1 else []

    def _judge(self, alignment: AnyAlignment | None) -> bool:
        """Show a complete alignment; return whether a finding of warning or above came of it."""
        return alignment is not None and self._judges.judge(
            replace(alignment, states=self.states())
        )

    def _judge_missing(
        self, alignment: AnyAlignment, trigger: Trigger, states: Mapping[int, RankState]
    ) -> None:
        is_consequence = self._groups.is_broken and alignment.kind != "group"
        if is_consequence or alignment.identity in self._shown:
            return
        self._shown.add(alignment.identity)
        before = self._conclusions.alarms()
        if self._judges.judge_missing(replace(alignment, states=states, trigger=trigger)):
            self._alarmed.add(alignment.identity)
            found = self._conclusions.alarms() - before
            self._open_alarms.setdefault(alignment.identity, set()).update(found)

    def _judge_files(self, files: FileWatch) -> None:
        for alignment in files.tests():
            self._judges.judge(replace(alignment, states=self.states()))
        for missing in files.missing():
            self._judges.judge_missing_file(missing)
        for subject, race in files.races():
            self._judges.judge_race(subject, replace(race, states=self.states()))


def _is_any_incomplete(ranks: Iterable[int], states: Mapping[int, RankState]) -> bool:
    return any(states[rank].incomplete for rank in ranks if rank in states)
