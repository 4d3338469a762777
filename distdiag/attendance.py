"""Which ranks of this node have begun and ended, and how the first that ended badly did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from distdiag.any_event import AnyEvent
from distdiag.event import Exited, Finished, ProbeDisabled, Raised, RankStarted
from distdiag.finding import Outcome
from distdiag.ranks import RankSet

_MAIN: Final = "MainThread"


class Attendance:
    """A roll call. Feed it all events of a poll, then let it `settle`."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Expect these ranks."""
        self.ranks = RankSet(ranks)
        self.exit_status: dict[int, int] = {}
        self._begun: set[int] = set()
        self._unobserved: set[int] = set()
        self._finished: set[int] = set()
        self._raised: set[int] = set()
        self._gone: set[int] = set()
        self._cause: Outcome | None = None
        self._was_hung = False

    def feed(self, event: AnyEvent) -> None:
        """Take in one event; only beginnings and ends matter."""
        match event:
            case RankStarted():
                self._begun.add(event.rank)
            case ProbeDisabled(probe="agent") if event.rank not in self._begun:
                self._unobserved.add(event.rank)
            case Finished():
                self._finished.add(event.rank)
                self.exit_status.setdefault(event.rank, event.exit_status)
            case Raised() if event.thread == _MAIN:
                self._raised.add(event.rank)
                self.exit_status[event.rank] = 1
            case Exited():
                self._gone.add(event.rank)

    def settle(self, *, is_hung: bool) -> None:
        """Decide what ended the run, when the first rank ended badly."""
        if self._cause is not None:
            return
        if self.died:
            self._cause = Outcome.KILLED
        elif any(self.exit_status.values()):
            self._cause = Outcome.FAILED
        else:
            self._was_hung = is_hung
            return
        if self._was_hung:
            self._cause = Outcome.HUNG  # whatever ended it: that is why somebody did

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
        if self._cause is not None:
            return self._cause
        if self.is_over:
            return Outcome.FINISHED
        return Outcome.HUNG if self._was_hung else Outcome.RUNNING
