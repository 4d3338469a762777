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

    ## What it detects
    `new_group`, `new_subgroups` or `init_device_mesh`, or a call that leads to one of them through
    the given files, under a condition that holds on some ranks only.

    ## Why it matters
    `new_group` is a collective of all ranks, members or not. A rank that leaves it out makes the
    others wait, and all later groups get shifted names.

    ## Example
    `if rank in ranks: group = dist.new_group(ranks)`

    ## How to fix
    Create all groups on all ranks, in one order, and keep the one that holds the rank; or pass
    `use_local_synchronization=True`.

    ## References
    - `torch.distributed.new_group`
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
