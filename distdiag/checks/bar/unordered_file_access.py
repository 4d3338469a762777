"""BAR001: a rank reads a file that another rank writes, and nothing orders the two."""

from __future__ import annotations

from distdiag.checks.bar.races import FileRace, RaceKind, phrase, several
from distdiag.findings.finding import Severity
from distdiag.views.files import Race


class UnorderedFileAccess(FileRace):
    """A rank reads a file that another rank writes, and nothing orders the two.

    ## What it detects
    A read of a path, and a write of the same path by another rank, for which no chain of barriers,
    collectives, messages, store calls or file locks says that one is over before the other begins.
    That is so in every run of the program, whether or not the file was there in time in this one.
    A read that copes with a missing file is no defect where the file appears at once, by a rename.

    ## Why it matters
    It works on a fast disk with few ranks. On the large cluster a rank reads half a file, or none.

    ## Example
    Rank 0 tokenises the data and saves it; all ranks load it in the next line, without a barrier.

    ## How to fix
    Put a barrier of all ranks concerned between the write and the read, outside of the condition on
    the rank; or let the writer broadcast what it has made.

    ## References
    - `torch.distributed.barrier`
    - `accelerate.Accelerator.main_process_first`, `accelerate.Accelerator.wait_for_everyone`
    """

    code = "BAR001"
    name = "unordered-file-access"
    severity = Severity.WARNING
    kind = RaceKind.UNORDERED

    why = "Nothing makes the reading rank wait until the file is whole; only luck does."
    fix = "Or let the writer broadcast what it has made."
    fix_changes = "The ranks wait there for the slowest of them."
    fix_leaves = "Readers in other programs, and file systems that show a new file late."
    disproof = "A collective in which the reader waits for the writer lies between the two lines."

    def say(self, race: Race) -> str:
        """Name the read first: it is what goes ahead too early."""
        return (
            f"{phrase(race.uses)}, and nothing orders that after {phrase(race.changes)}"
            f"{several(race)}"
        )
