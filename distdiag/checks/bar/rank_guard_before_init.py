"""BAR005: a condition on the rank is tested before init_process_group, so every rank passes it."""

from collections.abc import Mapping

from distdiag.checks.bar.races import FileRace, RaceKind, common_guard, name_of, phrase
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.files import Access, Race


class RankGuardBeforeInit(FileRace):
    """A condition on the rank is tested before init_process_group, so every rank passes it.

    ## What you see
    Every rank does the work of rank 0, and all ranks write the same file at once. Before
    `init_process_group` torch knows no ranks, so functions that return the rank return 0
    everywhere.

    ## Example
        # wrong: the helper answers 0 on every rank
        if get_rank_or_zero() == 0:
            download("data.tar")
        dist.init_process_group()

        # right
        dist.init_process_group()
        if dist.get_rank() == 0:
            download("data.tar")
        dist.barrier()

    ## How to fix
    Call `dist.init_process_group()` before this condition, and `dist.barrier()` on all ranks after
    the guarded block. Or test `int(os.environ["RANK"]) == 0` in the condition.

    Changes: The process group exists earlier; its timeout runs while rank 0 works.

    Leaves: Files that are already damaged: remove them.

    ## When it is not a defect
    The condition is intended to hold on these ranks, for example on one rank per node.

    To silence it, set `ignore = ["BAR005"]` in `distdiag.toml`.

    ## References
    - https://github.com/yiqiao-yin/deepspeed-course/issues/16
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.is_initialized
    """

    code = "BAR005"
    name = "rank-guard-before-init"
    severity = Severity.WARNING
    kind = RaceKind.GUARD_BEFORE_INIT

    def culprits(self, race: Race) -> Mapping[int, Access]:
        """Return those of the ranks that should not have passed."""
        first = min(race.changes)
        return {rank: access for rank, access in race.changes.items() if rank != first}

    def describe(self, race: Race) -> str:
        """Name the guard and who passed it."""
        guard = common_guard(race)
        assert guard is not None
        return (
            f"`{guard.text}` at {guard.location} is true on {RankSet(race.changes).phrase()}, "
            f"before any process group exists: {phrase(race.changes)}"
        )

    def advise(self, race: Race) -> str:
        """Return what to change: a barrier alone does not help."""
        return f"{self.fix} One rank then changes {name_of(race)}."
