"""BAR002: several ranks write one file at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distdiag.checks.bar.races import (
    FileRace,
    RaceKind,
    common_guard,
    evidence_of,
    first_of,
    is_idempotent,
    kind_of,
    location_of_access,
    name_of,
    several,
    subjects_of,
)
from distdiag.events.files import FileAction
from distdiag.findings.descriptions import at
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.files import Access, Race


class ConcurrentWriters(FileRace):
    """Several ranks write one file at the same time.

    ## What it detects
    Two ranks that open one path to write it, or put a new file in its place, and nothing orders the
    two. Where all of them are seen to write the same content this is information only.

    ## Why it matters
    The writes interleave, or the last one wins: the file is damaged or holds the data of one rank.

    ## Example
    Every rank downloads the data set into the same folder; every rank saves `model.pt`.

    ## How to fix
    Let one rank write, of each node if the storage is local to the node, and the others wait for it
    in a barrier. Where each rank has data of its own, put the rank into the name.

    ## References
    - `torch.distributed.get_rank`, `torch.distributed.barrier`
    """

    code = "BAR002"
    name = "concurrent-writers"
    severity = Severity.WARNING
    kind = RaceKind.WRITERS

    why = "A file has one content; of several writers at once none knows what it will be."
    fix = "Let one of these ranks write it and the others wait, or put the rank into the name."
    fix_changes = "The work of preparing the file is done once."
    fix_leaves = "Files that were damaged before: remove them."
    disproof = "The ranks write at different times, ordered by something that is not observed."

    def check(self, race: Race) -> Iterator[Finding]:
        """Say at info that the ranks write the same, else judge the race."""
        if kind_of(race) is not self.kind:
            return
        if not is_idempotent(race):
            yield from super().check(race)
            return
        yield self.finding(
            f"{race.ranks.phrase()} each write {name_of(race)}{several(race)} with the same "
            f"content{at(location_of_access(first_of(race.changes)))}",
            ranks=race.ranks,
            location=location_of_access(first_of(race.changes)),
            subjects=subjects_of(race),
            severity=Severity.INFO,
            grade=Grade.LIKELY,
            confidence=0.8,
            evidence=evidence_of(race),
        )

    def culprits(self, race: Race) -> Mapping[int, Access]:
        """Return those of all writers."""
        return race.changes

    def say(self, race: Race) -> str:
        """Name the writers, and the guard that lets several of them through."""
        access = first_of(race.changes)
        does = "replace" if access.event.action is FileAction.RENAME else "write"
        guard = common_guard(race)
        though = f", though `{guard.text}` at {guard.location} stands before it" if guard else ""
        return (
            f"{race.ranks.phrase()} {does} {name_of(race)}{several(race)}"
            f"{at(location_of_access(access))}, and nothing orders them{though}"
        )

    def advise(self, race: Race) -> str:
        """Return what to change: a barrier alone does not help."""
        return self.fix
