"""HNG009: a rank is still setting up process groups while the job stands still."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckInitialisation(StuckRank):
    """A rank is still setting up process groups while the job stands still.

    ## What it detects
    The ranks that the job waits for are inside `init_process_group`, `new_group`,
    `init_device_mesh` or the rendezvous, and have not moved for the hang threshold: a member
    has not come, or waits elsewhere.

    ## Why it matters
    The store and the rendezvous wait up to their timeout, half an hour by default, without
    naming who is missing.

    ## Example
    The world size in a configuration file is larger than the number of processes that were
    started.

    ## How to fix
    Compare the world size, MASTER_ADDR and MASTER_PORT of all ranks with what was started, and
    look for a rank that left or creates another group first.

    ## References
    - `torch.distributed.init_process_group`, `torch.distributed.new_group`
    """

    code = "HNG009"
    name = "stuck-initialisation"
    severity = Severity.ERROR
    activities = frozenset({Activity.INITIALISATION})
    instead = "is setting up a process group"

    why = (
        "Creating a process group needs every rank of its parent; whoever is there waits for "
        "those that are not."
    )
    fix = (
        "Compare the world size and the address that each rank uses with the processes that run; "
        "let all ranks create the same groups in the same order."
    )
    fix_changes = "Ranks that were alone become members of one job."
    fix_leaves = "Whatever kept the missing rank away."
    disproof = "All ranks have entered the same call, and it ends by itself."
