"""BAR003: a rank removes or renames a file that another rank still uses."""

from collections.abc import Mapping

from distdiag.checks.bar.races import FileRace, RaceKind, phrase, several, unordered
from distdiag.findings.finding import Severity
from distdiag.views.files import Access, Race


class DeletedOrRenamedWhileUsed(FileRace):
    """A rank removes or renames a file that another rank still uses.

    ## What you see
    The other rank fails because the file is missing, or works with the files that are left. Nothing
    makes the rank that removes or renames the file wait until the other ranks have finished with
    it.

    ## Example
        # wrong: a slow rank removes what a fast one has written already
        shutil.rmtree("cache", ignore_errors=True)
        fill("cache", shard=rank)

        # right: one rank removes, and all wait for it
        if rank == 0:
            shutil.rmtree("cache", ignore_errors=True)
        dist.barrier()
        fill("cache", shard=rank)

    ## How to fix
    Call `dist.barrier()` on all ranks after the last use, and then let one rank remove the file. If
    the ranks use the path again later, call a second barrier after the removal.

    Changes: The removing rank waits for the slowest user.

    Leaves: Other programs that use the file.

    ## When it is not a defect
    Something that distdiag does not observe makes the remover wait for the user between the two
    lines.

    To silence it, set `ignore = ["BAR003"]` in `distdiag.toml`.

    ## References
    - https://github.com/Project-MONAI/MONAI/issues/5595
    - https://github.com/bghira/SimpleTuner/issues/1445
    - https://docs.python.org/3/library/shutil.html#shutil.rmtree
    """

    code = "BAR003"
    name = "deleted-or-renamed-while-used"
    severity = Severity.WARNING
    kind = RaceKind.REMOVED

    def culprits(self, race: Race) -> Mapping[int, Access]:
        """Return the removals."""
        return race.changes

    def describe(self, race: Race) -> str:
        """Name the removal first."""
        if race.changes.keys() == race.uses.keys():
            return f"{phrase(race.changes)}{several(race)}, and nothing orders them"
        return unordered(race.changes, race.uses, race)

    def advise(self, race: Race) -> str:
        """Return what to change: the barrier belongs before the removal."""
        return (
            f"Let {race.ranks.phrase()} call a barrier after the use and before the removal, "
            "outside of any condition on the rank, and let only one rank remove it."
        )
