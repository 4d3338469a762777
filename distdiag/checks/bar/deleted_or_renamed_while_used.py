"""BAR003: a rank removes or renames what another rank still uses."""

from __future__ import annotations

from collections.abc import Mapping

from distdiag.checks.bar.races import FileRace, RaceKind, phrase, several
from distdiag.findings.finding import Severity
from distdiag.views.files import Access, Race


class DeletedOrRenamedWhileUsed(FileRace):
    """A rank removes or renames what another rank still uses.

    ## What it detects
    The removal of a file or a folder, or a rename that takes it away, and an access of another rank
    to it or to what lies in it, which nothing orders. Sockets count, such as that of a manager
    process whose owner ends.

    ## Why it matters
    The other rank fails with a missing file, or works with what happens to be left.

    ## Example
    Every rank clears the cache folder and fills it again; rank 0 ends, and with it the manager of
    a cache that its peers still read.

    ## How to fix
    Let one rank remove it, after a barrier that all users reach when they are done with it, and
    before one that they pass before they use it again.

    ## References
    - `shutil.rmtree`, `os.replace`
    - `torch.distributed.barrier`
    """

    code = "BAR003"
    name = "deleted-or-renamed-while-used"
    severity = Severity.WARNING
    kind = RaceKind.REMOVED

    why = "Nothing makes the removing rank wait until the others are done with it."
    fix = "Let only one rank remove it."
    fix_changes = "The removing rank waits for the slowest user."
    fix_leaves = "Users in other programs."
    disproof = "A collective in which the remover waits for the user lies between the two lines."

    def culprits(self, race: Race) -> Mapping[int, Access]:
        """Return the removals."""
        return race.changes

    def say(self, race: Race) -> str:
        """Name the removal first."""
        if race.changes.keys() == race.uses.keys():
            return f"{phrase(race.changes)}{several(race)}, and nothing orders them"
        return (
            f"{phrase(race.changes)}{several(race)}, and nothing orders that after "
            f"{phrase(race.uses)}"
        )

    def advise(self, race: Race) -> str:
        """Return what to change; the barrier stands before the removal."""
        return (
            f"Let {race.ranks.phrase()} call a barrier after the use and before the removal, "
            f"outside of any condition on the rank. {self.fix}"
        )
