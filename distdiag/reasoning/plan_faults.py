"""The faults that probes saw when programs applied their plans."""

from __future__ import annotations

from typing import NamedTuple

from distdiag.finding import Evidence, Location
from distdiag.plan_event import NamedFault, PatternMatches, PlanFault
from distdiag.plan_view import ProgramPlanView
from distdiag.ranks import RankSet


class SeenFault(NamedTuple):
    """A fault of one tensor or module, with the pattern that matched it."""

    pattern: PatternMatches
    fault: NamedFault
    ranks: RankSet

    def as_evidence(self, location: Location | None) -> Evidence:
        """Return the fault as a line of evidence."""
        summary = f'{self.fault.name}: "{self.pattern.pattern}" says {self.pattern.wanted}, '
        return Evidence(ranks=self.ranks, summary=summary + self.fault.text, location=location)


def faults_of(view: ProgramPlanView, kind: PlanFault) -> list[SeenFault]:
    """Return the faults of one kind in the order of the plan."""
    return [
        SeenFault(each.seen, fault, ranks)
        for each in view.patterns
        for fault, ranks in each.faults.items()
        if fault.fault is kind
    ]
