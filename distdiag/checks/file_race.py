"""What the checks share that speak of accesses to files which nothing orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from distdiag.alignment import Access, Race
from distdiag.checks.base import Check
from distdiag.event import FileAccess
from distdiag.finding import Finding, Grade
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import user_location
from distdiag.reasoning.file_races import (
    RaceKind,
    barrier_advice,
    evidence_of,
    first_of,
    grade_of,
    kind_of,
    severity_of,
    subjects_of,
)


class FileRace(Check):
    """Speaks of one kind of race; `culprits` and `say` tell whose accesses it names, and how."""

    needs = (FileAccess,)
    kind: ClassVar[RaceKind]

    def check_race(self, race: Race) -> Iterator[Finding]:
        """Judge accesses that nothing orders."""
        if kind_of(race) is not self.kind:
            return
        culprits = self.culprits(race)
        access = first_of(culprits)
        grade = grade_of(race)
        yield self.finding(
            self.say(race),
            ranks=RankSet(culprits),
            step=access.event.step,
            location=user_location(access.event.site.frames),
            subjects=subjects_of(race),
            severity=severity_of(race),
            grade=grade,
            confidence=0.95 if grade is Grade.PROVEN else 0.85,
            evidence=evidence_of(race),
            fix=self.advise(race),
        )

    def culprits(self, race: Race) -> Mapping[int, Access]:
        """Return the accesses that go ahead without having waited."""
        return race.uses

    def say(self, race: Race) -> str:
        """Return the sentence that explains the race."""
        raise NotImplementedError

    def advise(self, race: Race) -> str:
        """Return what to change, and where."""
        return f"{barrier_advice(race)} {self.fix}".strip()


def several(race: Race) -> str:
    """Return `` and 4 more files``, or nothing."""
    num_more = len(race.paths) - 1
    return f" (and {num_more} more file{'s' * (num_more > 1)} alike)" if num_more else ""


def name_of(race: Race) -> str:
    """Return the file as the program calls it."""
    return first_of(race.changes).event.written
