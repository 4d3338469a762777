"""COL008: ranks create process groups differently, or in different order."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.col.process_group_mismatch import ProcessGroupMismatch as Check
from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Rule
from distdiag.lint.guarded import call_text, guard_text, guarded_sites, places, severity_of
from distdiag.lint.modules import Module
from distdiag.lint.operations import Family


class ProcessGroupMismatch(Rule):
    """Ranks create process groups differently, or in different order.

    ## What you see
    `new_group` is a collective of all ranks, members or not. A rank that leaves it out makes the
    others wait, and all groups that are created later get shifted names.

    ## Example
        # wrong: only the members make the call
        if rank in (0, 1):
            group = dist.new_group([0, 1])
        # right: all ranks create all groups, in one order
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        group = groups[rank // 2]

    ## How to fix
    Create all groups on all ranks, in one order, and keep the one that holds the rank; or pass
    `use_local_synchronization=True`.

    ## When it is not a defect
    The condition holds on all ranks of the job, or on none.

    To silence a line, end it with `# distdiag: ignore[COL008]`.

    ## References
    - https://github.com/pytorch/pytorch/issues/25390
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group
    """

    code = Check.code
    name = Check.name
    severity = Severity.ERROR

    def look(self, module: Module) -> Iterator[LintFinding]:
        """Yield the creations of groups that some ranks leave out."""
        for found in guarded_sites(module, self.effects, Family.GROUP):
            yield self.finding(
                module,
                found.site.call,
                f"{call_text(found)} is not called by every rank: {guard_text(found)}",
                severity=severity_of(found),
                related=places(found),
            )
