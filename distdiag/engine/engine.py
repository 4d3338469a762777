"""The engine: events in, findings out. It neither reads a clock nor waits for anything."""

import logging
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from distdiag.checks.base import Check
from distdiag.config.numerics import USUAL, NumericsConfig
from distdiag.config.placement_rules import PlacementRule
from distdiag.engine.aligner import Aligner, CallOrder, Job, find_aligners
from distdiag.engine.coverage import Coverage
from distdiag.engine.creations import Creations
from distdiag.engine.hangs.aligner import CallAligner
from distdiag.engine.rank_status import RankStatuses
from distdiag.engine.ranks import RankStates, RankTracker
from distdiag.engine.runner import CheckRunner
from distdiag.events.base import Event
from distdiag.events.collectives import Collective, CollectiveState
from distdiag.events.lifecycle import EventsLost, Exited, Finished, Raised, StepEnd
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding
from distdiag.record.guard import Guard
from distdiag.views.base import View
from distdiag.views.rank_states import RankState

_log = logging.getLogger(__name__)

_CLEAR: Final = (Collective, CollectiveState, EventsLost, Exited, Finished, Raised, StepEnd)


class Engine:
    """Lets aligners put the events of all ranks side by side, and checks judge what they build.

    A check or an aligner that raises is switched off, which is a finding; the others go on.

    Feed events as they come, call `tick` with the time at every poll, and `finish` at the end.
    `findings` holds the conclusions at any moment. When `evidence_wanted` is not empty, the
    stacks of those ranks are wanted as `Stacks` events (with `error` where there are none).
    """

    def __init__(
        self,
        checks: Iterable[Check[Any]],
        world: RankSet,
        *,
        hang_timeout_s: float | None = None,
        rules: Sequence[PlacementRule] = (),
        only_start: bool = False,
        numerics: NumericsConfig = USUAL,
    ) -> None:
        """Prepare to judge a run of these ranks.

        `hang_timeout_s` is the threshold in seconds that the user set; None lets the duration of
        the steps decide. `rules` are the user's own plan of how tensors are sharded. `only_start`:
        the ranks do not look at the steps of their models. `numerics` holds the thresholds of the
        checks of numbers.
        """
        self.world = world
        self._creations = Creations()
        self._runner = CheckRunner(checks, self._creations)
        self._trackers = {rank: RankTracker(rank, hang_timeout_s) for rank in world}
        self._now_ns = 0
        self.rank_status = RankStatuses(world)
        self._order = CallOrder()
        job = Job(
            world,
            self.states,
            self._trackers,
            self._runner.store,
            self._order,
            tuple(rules),
            only_start,
            hang_timeout_s,
            numerics,
        )
        self._calls = CallAligner(job)
        # Calls come first: they tell whether the order that others rely upon is known.
        others = [kind(job) for kind in find_aligners() if self._is_wanted(kind)]
        self._aligners: tuple[Aligner, ...] = (self._calls, *others)
        self._by_event: dict[type[Event], tuple[Aligner, ...]] = {}
        self._guards = {a: Guard(partial(self._switch_off, a)) for a in self._aligners}
        self._coverage = Coverage(self._runner, self._aligners, job)
        self._forgotten = job.forgotten
        self._resuming: set[int] = set()

    def _is_wanted(self, kind: type[Aligner]) -> bool:
        is_judged = any(self._runner.judging(view) for view in kind.builds)
        return is_judged and kind is not CallAligner

    # What came out

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The conclusions so far, in the order in which they were drawn."""
        return self._runner.store.all()

    def take_withdrawn(self) -> list[Finding]:
        """Return what was taken back since the last call, as the notes that are left of it."""
        return self._runner.store.take_withdrawn()

    @property
    def evidence_wanted(self) -> RankSet:
        """The ranks whose stacks should be dumped now."""
        return RankSet(self._calls.stall.wanted if self._has_calls else ())

    @property
    def is_hung(self) -> bool:
        """Whether the job stands still, for a reason that a finding of warning or above names."""
        return self._has_calls and self._calls.is_hung

    @property
    def evidence_s(self) -> float:
        """How long taking the wanted stacks may last, in seconds, where somebody waits for them."""
        return self._calls.stall.evidence_s

    @property
    def checked(self) -> tuple[str, ...]:
        """The codes of the checks of this run, those that were switched off since among them."""
        return tuple(c.code for c in self._runner.checks if c.code not in self._runner.disabled)

    @property
    def not_checked(self) -> dict[str, str]:
        """What was not observed, and the codes of the checks that did not see all, and why."""
        return self._coverage.gaps()

    @property
    def idle(self) -> frozenset[str]:
        """The codes of the checks for which the run has nothing to judge."""
        return self._coverage.idle

    @property
    def has_gap(self) -> bool:
        """Whether events were lost that this engine has not seen, and others may have."""
        return self._forgotten.has_gap

    @property
    def unobserved(self) -> RankSet:
        """The ranks of the job that nobody reported at the start: nothing of them is read."""
        return self._coverage.unobserved

    def states(self) -> Mapping[int, RankState]:
        """Return what is known of every rank now."""
        waiting = self._calls.waiting if self._has_calls else lambda _: ()
        return RankStates(self._trackers, waiting, self._now_ns)

    # What goes in

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        tracker = self._trackers.get(event.rank)
        if tracker is None:
            _log.warning("event of rank %d, which is not in the world %s", event.rank, self.world)
            return
        self.rank_status.feed(event)
        if self.rank_status.is_aborted:
            return  # what the abort does to the ranks is no finding
        if isinstance(event, Exited) and self.is_hung:
            tracker.left_hang = True
        tracker.feed(event, self._now_ns)
        self._coverage.feed(event)
        self._creations.feed(event)
        if isinstance(event, EventsLost):
            self._resuming.add(event.rank)
            self._forgotten.has_gap = True
        elif event.rank in self._resuming and not self._is_clear(event):
            return
        for aligner in self._wanting(type(event)):
            with self._guards[aligner]:
                self._show(aligner.feed(event))
        self._runner.show(event)

    def _is_clear(self, event: Event) -> bool:
        """Whether an event tells its own even though some before it were lost.

        What ranks do several times in one step is counted: a step of which the beginning is lost
        is left out.
        """
        if isinstance(event, StepEnd):
            self._resuming.discard(event.rank)
        return event.seq < 0 or isinstance(event, _CLEAR)

    def advance(self, now_ns: int) -> None:
        """Let the clock go on, and judge nothing: what is fed next comes at this time."""
        self._now_ns = max(self._now_ns, now_ns)

    def assume_time(self) -> None:
        """Take the time that passes from now on for assumed: nobody knows how long it was."""
        for tracker in self._trackers.values():
            tracker.is_time_assumed = True

    def tick(self, now_ns: int, unseen: Collection[int] = ()) -> None:
        """Let time pass. Nothing can be heard now of the ranks in `unseen`."""
        if self.rank_status.is_aborted:
            return
        self._now_ns = now_ns
        for tracker in self._trackers.values():
            tracker.look(now_ns, is_seen=tracker.rank not in unseen)
        for aligner in self._aligners:
            with self._guards[aligner]:
                self._show(aligner.tick(now_ns, unseen))

    def settle(self) -> None:
        """Decide how the run ended if a rank has ended badly; after each poll, whoever ended."""
        self.rank_status.settle(is_hung=self.is_hung)

    def finish(self) -> None:
        """Judge what is incomplete at the end of the run, the job as a whole last."""
        if self.rank_status.is_aborted:
            return
        for aligner in reversed(self._aligners):
            with self._guards[aligner]:
                self._show(aligner.end())

    def _switch_off(self, aligner: Aligner, error: Exception) -> None:
        """Go on without an aligner that raised; what it showed before stays judged."""
        self._aligners = tuple(other for other in self._aligners if other is not aligner)
        self._by_event.clear()
        if aligner is self._calls:
            self._order.doubt(0)  # nobody tells any more whether calls are paired wrongly
        self._coverage.lose(aligner, error)

    @property
    def _has_calls(self) -> bool:
        """Whether the aligner of calls, which knows who waits for whom, still runs."""
        return self._calls in self._aligners

    def _wanting(self, kind: type[Event]) -> tuple[Aligner, ...]:
        wanting = self._by_event.get(kind)
        if wanting is None:
            wanting = tuple(a for a in self._aligners if issubclass(kind, a.needs))
            self._by_event[kind] = wanting
        return wanting

    def _show(self, views: Iterable[View]) -> None:
        if not isinstance(views, Generator):
            for view in views:
                self._runner.show(view)
            return
        try:
            view = next(views)
            while True:
                view = views.send(self._runner.show(view))
        except StopIteration:
            return
