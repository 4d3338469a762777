"""HNG010: a rank is stuck while it shuts down."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckTeardown(StuckRank):
    """A rank is stuck while it shuts down.

    ## What it detects
    The ranks that the job waits for are inside `destroy_process_group` or the exit handlers of
    the interpreter and have not moved for the hang threshold.

    ## Why it matters
    The training is done, but the processes stay and keep the allocation until it runs out.

    ## Example
    A process group is destroyed while a collective of another rank still runs on it.

    ## How to fix
    Let all ranks finish their collectives, wait for their Works, end threads and pools, and
    then destroy the group on all of them.

    ## References
    - `torch.distributed.destroy_process_group`
    """

    code = "HNG010"
    name = "stuck-teardown"
    severity = Severity.ERROR
    activities = frozenset({Activity.TEARDOWN})
    instead = "is shutting down"

    why = (
        "Shutting down waits for what still runs: collectives whose peers have not come, threads, "
        "worker processes."
    )
    fix = (
        "Wait for all Works and join threads and pools before destroy_process_group, and call it "
        "on every rank at the same point."
    )
    fix_changes = "The end of the job waits for what is still running."
    fix_leaves = "Errors that happened before the shutdown began."
    disproof = "The process ends by itself."
