"""BAR002: several ranks write one file at the same time."""

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

    ## What you see
    The file is damaged, or holds the data of one rank only. Several ranks write it at the same
    time: their writes mix, or the last one wins.

    ## Example
        # wrong: every rank writes the same path
        torch.save(model.state_dict(), "model.pt")

        # right: one rank writes, the others wait
        if rank == 0:
            torch.save(model.state_dict(), "model.pt")
        dist.barrier()

    ## How to fix
    Let one rank write the file (one rank per node if the storage is local to a node), and call
    `dist.barrier()` on all ranks after the write. Or, if each rank has its own data, put the rank
    into the file name: `f"cache-{rank}.bin"`.

    Changes: The work of preparing the file is done once.

    Leaves: Files that are already damaged: remove them.

    ## When it is not a defect
    The ranks write at different times, ordered by something that distdiag does not observe.

    Writers that were seen to write the same content get severity info.

    Writers that were seen to write the same content get severity info. To silence it, set
    `ignore = ["BAR002"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/tutorials/issues/3065
    - https://github.com/huggingface/trl/issues/3106
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.barrier
    """

    code = "BAR002"
    name = "concurrent-writers"
    severity = Severity.WARNING
    kind = RaceKind.WRITERS

    def check(self, race: Race) -> Iterator[Finding]:
        """Report writers of the same content at info, and judge all others as a race."""
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
        """Return the accesses of all writers."""
        return race.changes

    def describe(self, race: Race) -> str:
        """Name the writers, and the guard that lets several of them through."""
        access = first_of(race.changes)
        does = "replace" if access.event.action is FileAction.RENAME else "write"
        guard = common_guard(race)
        though = f", though `{guard.text}` at {guard.location} stands before it" if guard else ""
        return (
            f"{race.ranks.phrase()} {does} {name_of(race)}{several(race)}"
            f"{at(location_of_access(access))}, and nothing orders them{though}"
        )
