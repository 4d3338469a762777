"""BAR005: a condition on the rank is evaluated before there are ranks, so all ranks pass it."""

from __future__ import annotations

from collections.abc import Mapping

from distdiag.checks.bar.races import FileRace, RaceKind, common_guard, name_of, phrase
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.files import Access, Race


class RankGuardBeforeInit(FileRace):
    """A condition on the rank is evaluated before there are ranks, so all ranks pass it.

    ## What it detects
    Several ranks that change one file under a condition on the rank which should let through one of
    them, before any of them has created the default process group.

    ## Why it matters
    Helpers that say "rank 0 while nothing is initialised" let every rank do the work of rank 0, and
    skip the barrier behind it. All write the same file at once.

    ## Example
    `if get_rank_or_zero() == 0: download()` stands before `init_process_group()`.

    ## How to fix
    Initialise the process group first, or read the rank from the environment variable `RANK`.

    ## References
    - `torch.distributed.is_initialized`, `torch.distributed.get_rank`
    """

    code = "BAR005"
    name = "rank-guard-before-init"
    severity = Severity.WARNING
    kind = RaceKind.GUARD_BEFORE_INIT

    why = "Before init_process_group torch knows of no ranks, so such helpers answer 0 everywhere."
    fix = (
        "Move init_process_group before this condition, or let the condition read the environment "
        "variable RANK; then let the others wait in a barrier."
    )
    fix_changes = "The process group exists earlier; its timeout runs while rank 0 works."
    fix_leaves = "Files that were damaged before: remove them."
    disproof = "The condition is meant to hold on these ranks, such as one of each node."

    def culprits(self, race: Race) -> Mapping[int, Access]:
        """Return those of the ranks that should not have passed."""
        first = min(race.changes)
        return {rank: access for rank, access in race.changes.items() if rank != first}

    def say(self, race: Race) -> str:
        """Name the guard and who passed it."""
        guard = common_guard(race)
        assert guard is not None
        return (
            f"`{guard.text}` at {guard.location} holds on {RankSet(race.changes).phrase()} alike, "
            f"before any process group exists: {phrase(race.changes)}"
        )

    def advise(self, race: Race) -> str:
        """Return what to change: a barrier alone does not help."""
        return f"{self.fix} One rank then changes {name_of(race)}."
