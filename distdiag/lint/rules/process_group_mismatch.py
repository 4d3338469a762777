"""COL008: ranks create process groups differently, or in different order."""

from __future__ import annotations

from distdiag.checks.col.process_group_mismatch import ProcessGroupMismatch as Check
from distdiag.findings.finding import Severity
from distdiag.lint.guarded import GuardRule
from distdiag.lint.operations import Family


class ProcessGroupMismatch(GuardRule):
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
    family = Family.GROUP
