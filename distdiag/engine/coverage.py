"""Which checks have looked, which had nothing to judge, and which could not see."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from distdiag.checks.base import Check
from distdiag.engine.aligner import Aligner, Gap, Job, LeftOut, NothingThere, NotObserved
from distdiag.engine.runner import CheckRunner
from distdiag.events.base import Event
from distdiag.events.collectives import GroupCreated
from distdiag.events.lifecycle import EventsLost, RankStarted, Unobserved
from distdiag.events.ranks import RankSet
from distdiag.record.guard import attempt
from distdiag.views.base import View

_HERE: Final = (EventsLost, GroupCreated, RankStarted, Unobserved)


@dataclass(frozen=True, slots=True)
class Looked:
    """The check judged what the run holds of its views."""


class Coverage:
    """The one owner of "did not look": aligners, probes and the runner tell it why.

    Ranks of a process group that nobody observes are `unobserved`.
    """

    def __init__(self, runner: CheckRunner, aligners: Iterable[Aligner], job: Job) -> None:
        self.unobserved = RankSet()
        self._runner = runner
        self._aligners = tuple(aligners)
        self._lost: dict[Aligner, NotObserved] = {}
        self._world = job.world
        self._forgotten = job.forgotten
        self._is_member = False
        self._blind: dict[tuple[str, str, str], set[int]] = {}
        self._started_ns: dict[int, int] = {}
        self._cut: set[int] = set()
        self._kept_from: dict[int, Event] = {}

    def feed(self, event: Event) -> None:
        """Take in one event: who is unobserved, and what the probes of a rank do not see."""
        if event.rank in self._cut and event.seq >= 0:
            self._cut.discard(event.rank)
            self._kept_from[event.rank] = event
        if not isinstance(event, _HERE):
            return
        match event:
            case RankStarted():
                self._started_ns[event.rank] = event.time_ns
            case EventsLost():
                self._cut.add(event.rank)
            case Unobserved():
                key = event.what, event.probe, event.reason
                self._blind.setdefault(key, set()).add(event.rank)
            case GroupCreated() if event.has_processes:
                before = self.unobserved if self._is_member else RankSet()
                self._is_member = True
                # Smaller groups are parts of the one whose scope is the whole job.
                scope = event.scope if len(event.scope) > len(self._world) else ()
                self.unobserved = RankSet({*before, *scope} - set(self._world))

    def lose(self, aligner: Aligner, error: Exception) -> None:
        """Report that an aligner raised this: nobody sees what it would have shown."""
        reason = self._runner.report_crash(f"aligner {type(aligner).__name__}", error)
        self._lost[aligner] = NotObserved(reason)

    def of(self, check: Check[Any]) -> Looked | Gap:
        """Say whether a check has looked, and if not, why."""
        return self._of(check, self._by_view())

    def _of(self, check: Check[Any], known: Mapping[type[View | Event], Gap]) -> Looked | Gap:
        if check.code in self._runner.disabled:
            return NotObserved(self._runner.disabled[check.code])
        if self._alone and not any(_is_of_one_rank(view) for view in check.views):
            return NotObserved(self._alone)
        gaps = [known[view] for view in check.views if view in known]
        unseen = next((gap for gap in gaps if isinstance(gap, NotObserved)), None)
        if unseen is not None:
            return unseen
        if not gaps or len(gaps) < len(check.views):
            return Looked()
        # A profile is the reason only where the rest of what the check judges is left out, too.
        return next((gap for gap in gaps if not isinstance(gap, LeftOut)), gaps[0])

    def gaps(self) -> dict[str, str]:
        """Return what probes do not observe, and the codes of checks that did not look, and why."""
        reasons: dict[str, list[str]] = {}
        for (what, probe, reason), ranks in self._blind.items():
            text = f"probe {probe} of {RankSet(ranks).phrase()} does not observe it: {reason}"
            reasons.setdefault(what, []).append(text)
        found = {what: "; ".join(texts) for what, texts in reasons.items()}
        found |= self._forgotten.reasons() | self._gap() | self._runner.store.left_out()
        known = self._by_view()
        for check in self._runner.checks:
            gap = self._of(check, known)
            if not isinstance(gap, Looked):
                found[check.code] = gap.reason
        return found

    def _gap(self) -> dict[str, str]:
        """Say from when on events are kept of ranks that wrote more than is kept."""
        if not self._kept_from:
            return {}
        ranks = RankSet(self._kept_from)
        last = max(self._kept_from.values(), key=lambda event: event.time_ns)
        after_s = (last.time_ns - self._started_ns.get(last.rank, last.time_ns)) / 1e9
        return {
            f"older events of {ranks.phrase()}": f"all events are kept from step {last.step} on, "
            f"{_duration(after_s)} after the start; of those before only the first MiB of each "
            "rank (keep_events)"
        }

    @property
    def idle(self) -> frozenset[str]:
        """The codes of the checks for which the run has nothing to judge."""
        known = self._by_view()
        gaps = ((check.code, self._of(check, known)) for check in self._runner.checks)
        return frozenset(code for code, gap in gaps if isinstance(gap, NothingThere))

    def _by_view(self) -> dict[type[View | Event], Gap]:
        known: dict[type[View | Event], Gap] = {}
        for aligner in self._aligners:
            if aligner not in self._lost:
                known |= attempt(partial(self.lose, aligner), aligner.gaps) or {}
        for aligner, gap in self._lost.items():
            known |= dict.fromkeys(aligner.builds, gap)
        return known

    @property
    def _alone(self) -> str:
        """Why the ranks that were observed were compared with nobody; empty if they were."""
        if not self.unobserved or len(self._world) > 1:
            return ""
        observed = RankSet(self._world)
        return (
            f"only {observed.phrase()} was observed and not {self.unobserved.phrase()}, so no "
            "ranks were compared"
        )


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours >= 1 else f"{seconds:.0f} s"


def _is_of_one_rank(view: type[View | Event]) -> bool:
    return not issubclass(view, View) or view.is_of_one_rank
