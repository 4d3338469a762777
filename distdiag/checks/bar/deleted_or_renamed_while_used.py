"""BAR003: a rank removes or renames a file that another rank still uses."""

from collections.abc import Mapping

from distdiag.checks.bar.races import FileRace, RaceKind, phrase, several, unordered
from distdiag.findings.finding import Severity
from distdiag.views.files import Access, Race


class DeletedOrRenamedWhileUsed(FileRace):
    """A rank removes or renames a file that another rank still uses.

    ## What you see
    The other rank fails with a missing file, or works with what happens to be left. Nothing makes
    the removing rank wait until the others are done.

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
    Let only one rank remove it, after a barrier that all users reach when they are done, and before
    a barrier that they pass before they use it again.

    Changes: The removing rank waits for the slowest user.

    Leaves: Users in other programs.

    ## When it is not a defect
    Something that is not observed makes the remover wait for the user between the two lines.

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
