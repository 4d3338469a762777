"""Which ranks have begun and ended, and how the run ended: by how the first rank ended badly."""

from collections.abc import Iterable
from typing import Final

from distdiag.checks.shared.failures import GRACE_NS, says_interrupted, says_peer_is_gone
from distdiag.events.base import Event
from distdiag.events.lifecycle import (
    Exited,
    Finished,
    Monitored,
    ProbeDisabled,
    Raised,
    RankStarted,
)
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome
from distdiag.views.rank_states import was_asked_to_end

_MAIN: Final = "MainThread"


class RankStatuses:
    """Feed it all events of a poll, then let it `settle`.

    `exit_status` holds minus the number of the signal for ranks that one has ended. `is_aborted`:
    the monitor has killed the ranks, since they hang and the user wants that.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = RankSet(ranks)
        self.exit_status: dict[int, int] = {}
        self.is_aborted = False
        self._begun: set[int] = set()
        self._unobserved: set[int] = set()
        self._finished: set[int] = set()
        self._raised: set[int] = set()
        self._gone: set[int] = set()
        self._missed_peers: set[int] = set()
        self._failed: set[int] = set()
        self._left_ns: dict[int, int] = {}
        self._cause: Outcome | None = None
        self._is_cause_sure = False
        self._was_hung = False

    def feed(self, event: Event) -> None:
        """Take in one event; only beginnings and ends matter."""
        match event:
            case RankStarted():
                self._begun.add(event.rank)
            case ProbeDisabled(probe="agent") if event.rank not in self._begun:
                self._unobserved.add(event.rank)
            case Finished():
                self._leave(event, self._finished, event.exit_status)
            case Raised() if event.thread == _MAIN:
                self._leave(event, self._raised, 1)
                if says_peer_is_gone(event.type, event.message):
                    self._missed_peers.add(event.rank)
                elif not says_interrupted(event.type):
                    self._failed.add(event.rank)
            case Exited():
                self._leave(event, self._gone, event.status)
            case Monitored(act="aborted"):
                self.is_aborted = True

    def _leave(self, event: Event, ranks: set[int], status: int | None) -> None:
        ranks.add(event.rank)
        self._left_ns.setdefault(event.rank, event.time_ns)
        if status is not None:
            self.exit_status.setdefault(event.rank, status)

    def settle(self, *, is_hung: bool) -> None:
        """Decide what ended the run, when the first rank ended badly.

        That a peer is gone may be told before the peer is seen dead, and a rank that its launcher
        has ended may be seen before the exception of the other: so far the cause is not sure.
        """
        if self._is_cause_sure:
            return
        bad = self.died | self.raised | {r for r in self._finished if self.exit_status[r]}
        if not bad:
            self._was_hung = is_hung
            return
        first = min(bad, key=self._order)
        was_asked = was_asked_to_end(self.exit_status.get(first))
        is_doubtful = first in self._missed_peers or (first in self.died and was_asked)
        self._is_cause_sure = not (is_doubtful and self.undisturbed)
        is_killed = first in self.died or was_asked
        self._cause = Outcome.KILLED if is_killed else Outcome.FAILED
        if self._was_hung:
            self._cause = Outcome.HUNG  # whatever ended it: that is why somebody did

    def _order(self, rank: int) -> tuple[bool, int, bool]:
        """Return what the first bad end is the least of.

        A status or exception of its own comes before the signal by which a launcher ends the others
        then: when a rank died is known only roughly. So does a death before the exception by which
        a peer tells of it: a killed process closes its connections before anybody sees it dead.
        With equal times it is the death that was seen late.
        """
        has_failed = self._failed or any(
            self.exit_status[r] > 0 for r in self._finished - self._raised
        )
        is_by_signal = rank in self.died and was_asked_to_end(self.exit_status.get(rank))
        comes_after = (has_failed and is_by_signal) or self._tells_of_a_death(rank)
        return (comes_after, self._left_ns[rank], rank not in self.died)

    def _tells_of_a_death(self, rank: int) -> bool:
        """Say whether a rank raised because of a death that its launcher did not cause."""
        latest_ns = self._left_ns[rank] + GRACE_NS
        return rank in self._missed_peers and any(
            self._left_ns[r] < latest_ns and not was_asked_to_end(self.exit_status.get(r))
            for r in self.died
        )

    @property
    def died(self) -> RankSet:
        """The ranks whose process is gone and had neither finished nor raised."""
        return RankSet(self._gone - self._finished - self._raised)

    @property
    def raised(self) -> RankSet:
        """The ranks of which an exception was not caught."""
        return RankSet(self._raised)

    @property
    def ended(self) -> RankSet:
        """The ranks whose script has come to its end or whose process is gone."""
        return RankSet(self._finished | self._gone)

    @property
    def gone(self) -> RankSet:
        """The ranks whose process is gone."""
        return RankSet(self._gone)

    @property
    def absent(self) -> RankSet:
        """The ranks that never began, of a run that others have begun."""
        return RankSet(set(self.ranks) - self._begun - self.ended if self._begun else ())

    @property
    def unobserved(self) -> RankSet:
        """The ranks that run without an agent: nothing tells what they do, or when they end."""
        return RankSet(self._unobserved)

    @property
    def over(self) -> RankSet:
        """The ranks that have ended, and those of which no end will ever be seen."""
        return RankSet(self._finished | self._gone | self._unobserved)

    @property
    def is_over(self) -> bool:
        """Whether all ranks that are observed have ended."""
        return bool(self.ended) and self.over == self.ranks

    @property
    def undisturbed(self) -> RankSet:
        """The ranks that are still in the middle of their script."""
        return RankSet(set(self.ranks) - self._finished - self._gone - self._raised)

    @property
    def outcome(self) -> Outcome:
        """How the run ended, or whether it runs or hangs."""
        if self.is_aborted:
            return Outcome.ABORTED
        if self._cause is not None:
            return self._cause
        if self.is_over:
            return Outcome.FINISHED
        return Outcome.HUNG if self._was_hung else Outcome.RUNNING

    def final(self, lost: Iterable[int] = ()) -> Outcome:
        """Return how the run ended, now that nobody looks any more; `lost` are out of sight."""
        if self.outcome is not Outcome.RUNNING:
            return self.outcome
        # Of ranks that were never seen nothing is said; the end of others was not seen.
        lost = RankSet(lost)
        is_seen = RankSet(self.ended | lost | self.absent) == self.ranks
        return Outcome.FINISHED if is_seen and not self.ended <= lost else Outcome.FAILED
