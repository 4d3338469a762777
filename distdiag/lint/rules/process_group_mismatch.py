"""COL008: ranks create process groups differently, or in different order."""

from distdiag.checks.col.process_group_mismatch import ProcessGroupMismatch as Check
from distdiag.findings.finding import Severity
from distdiag.lint.guarded import GuardRule
from distdiag.lint.operations import Family


class ProcessGroupMismatch(GuardRule):
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
    family = Family.GROUP
