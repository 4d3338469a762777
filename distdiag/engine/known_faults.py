"""Collects what logs and stacks show of well-known faults, until the end of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.hng.known_fault import FaultView
from distdiag.checks.shared.failures import known_fault_of
from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.events.base import Event
from distdiag.events.stacks import FaultLogged, Stacks
from distdiag.findings.known_faults import fault_of_stack, known_faults
from distdiag.views.base import View

_MOST_LINES: Final = 4096
"""So many lines of faults are kept, the first ones: those that follow are consequences."""
_NO_LINE: Final = NothingThere("known faults", "no line of a known fault is in a log")


class FaultAligner(Aligner):
    """Shows the lines of all logs at the end; what stacks show supports other findings at once."""

    needs = (FaultLogged, Stacks)
    builds = (FaultView,)

    def __init__(self, job: Job) -> None:
        """No fault was seen."""
        super().__init__(job)
        self._lines: list[FaultLogged] = []
        self._causes = {row.id: row for row in known_faults() if row.role == "cause"}

    def feed(self, event: Event) -> Iterator[View]:
        """Keep a line, or look at stacks."""
        match event:
            case FaultLogged():
                if len(self._lines) < _MOST_LINES:
                    self._lines.append(event)
            case Stacks():
                self._look(event)
        yield from ()

    def _look(self, stacks: Stacks) -> None:
        versions = {"torch": self.job.states()[stacks.rank].torch}
        for thread in stacks.threads:
            if row := fault_of_stack(thread.frames, versions):
                self.job.store.support(row.evidence([stacks.rank], said=f"thread {thread.name}"))

    def end(self) -> Iterator[View]:
        """Show what the logs hold; it also supports findings about the same ranks."""
        states = self.job.states()
        for line in self._lines:
            row = self._causes.get(line.fault)
            if row is None or line.was_survived or not line.is_rank_known:
                continue
            raised = known_fault_of(states[line.rank])
            if raised is None or raised.id != row.id:
                self.job.store.support(row.evidence([line.rank], said=line.text))
        if self._lines:
            yield FaultView(tuple(self._lines), states)

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was any line."""
        return {} if self._lines else {FaultView: _NO_LINE}
