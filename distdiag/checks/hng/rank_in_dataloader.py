"""HNG004: a rank fetches data while the others wait for it in a collective."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class RankInDataloader(StuckRank):
    """A rank fetches data while the others wait for it in a collective.

    ## What it detects
    A collective in which ranks have waited for the hang threshold, and the ranks that they wait for
    are inside their data loader, by their stack or by the phase of their last heartbeat.

    ## Why it matters
    It looks like a hang of the network and is one of the data: a slow or dead file server, a worker
    process that died or deadlocked, one rank with a much larger sample.

    ## Example
    The shard of one rank lies on storage that does not answer.

    ## How to fix
    Look at the workers and the storage of the named rank. `DataLoader(timeout=...)` turns a worker
    that is stuck into an error; `num_workers=0` shows the line that it is stuck in.

    ## References
    - `torch.utils.data.DataLoader(timeout=..., num_workers=..., multiprocessing_context=...)`
    """

    code = "HNG004"
    name = "rank-in-dataloader"
    severity = Severity.WARNING
    activities = frozenset({Activity.DATA_LOADER})
    instead = "waits for a batch"

    why = "The rank cannot come to the collective before it has its batch."
    fix = (
        "Look at the storage and the worker processes of this rank: run it with num_workers=0 to "
        "see the line, or set DataLoader(timeout=...) to make a stuck worker an error."
    )
    fix_changes = "With a timeout, a slow batch ends the run instead of holding it up."
    fix_leaves = (
        "Uneven amounts of data per rank, which end in another wait at the end of an epoch."
    )
    disproof = "The stack of the rank shows it outside of the data loader."
