"""HNG007: a rank saves or loads a checkpoint while the others wait for it."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckCheckpoint(StuckRank):
    """A rank saves or loads a checkpoint while the others wait for it.

    ## What it detects
    The ranks that the others wait for are inside saving or loading (`torch.save`, `torch.load`,
    distributed checkpoints, safetensors) and have not moved for the hang threshold.

    ## Why it matters
    The others wait in a collective whose timeout counts the time of the checkpoint; a slow file
    server then ends the job.

    ## Example
    Rank 0 writes 80 GB to a file server that others use too, and the barrier of the others
    times out after ten minutes.

    ## How to fix
    Look at the storage. Save with all ranks (`torch.distributed.checkpoint`), save
    asynchronously, or give the process group a longer timeout.

    ## References
    - `torch.distributed.checkpoint.async_save`
    - `torch.distributed.init_process_group(timeout=...)`
    """

    code = "HNG007"
    name = "stuck-checkpoint"
    severity = Severity.WARNING
    activities = frozenset({Activity.CHECKPOINT})
    instead = "is saving or loading a checkpoint"

    why = (
        "The others have come to a collective and this rank has not: what it reads or writes "
        "takes longer than they are ready to wait."
    )
    fix = (
        "Look at the storage that this rank uses. Let all ranks write their part "
        "(torch.distributed.checkpoint), write asynchronously, or raise the timeout of the group."
    )
    fix_changes = "Asynchronous saving takes memory for a copy of the state."
    fix_leaves = "A file system that is slow for everybody else."
    disproof = "The checkpoint is complete and the rank is elsewhere."
