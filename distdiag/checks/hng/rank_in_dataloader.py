"""HNG004: a rank waits for its data loader while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class RankInDataloader(StuckRank):
    """A rank waits for its data loader while the others wait for it.

    ## What you see
    The other ranks wait in a collective, so the hang looks like a network fault, but this rank
    waits for its data. Common causes are a slow or dead file server, a worker process that died or
    deadlocked, and a sample that is much larger than the others.

    ## Example
        # wrong: a worker that is stuck holds up the job for ever
        loader = DataLoader(data, num_workers=4)

        # right: it becomes an error, and workers inherit no locks of this process
        loader = DataLoader(data, num_workers=4, timeout=120, multiprocessing_context="spawn")

    ## How to fix
    Run this rank with `num_workers=0` to see the line that is stuck, and check the storage that it
    reads. Or pass `timeout=120` to the `DataLoader`, so that a stuck worker becomes an error.

    Changes: With a timeout, a slow batch ends the run instead of holding it up.

    Leaves: Uneven amounts of data per rank, which end in another wait at the end of an epoch.

    ## When it is not a defect
    The stack of the rank shows a line outside of the data loader.

    To silence it, set `ignore = ["HNG004"]` in `distdiag.toml`.

    ## References
    - https://github.com/ultralytics/ultralytics/issues/26085
    - https://github.com/Zulko/moviepy/issues/576
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
    """

    code = "HNG004"
    name = "rank-in-dataloader"
    severity = Severity.WARNING
    activities = frozenset({Activity.DATA_LOADER})
    instead = "waits for a batch"
