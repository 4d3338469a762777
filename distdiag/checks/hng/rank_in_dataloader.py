"""HNG004: a rank waits for its data loader while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class RankInDataloader(StuckRank):
    """A rank waits for its data loader while the others wait for it.

    ## What you see
    It looks like a hang of the network and is one of the data: a slow or dead file server, a worker
    process that died or deadlocked, one rank with a much larger sample.

    ## Example
        # wrong: a worker that is stuck holds up the job for ever
        loader = DataLoader(data, num_workers=4)

        # right: it becomes an error, and workers inherit no locks of this process
        loader = DataLoader(data, num_workers=4, timeout=120, multiprocessing_context="spawn")

    ## How to fix
    Look at the storage and the worker processes of this rank: run it with num_workers=0 to see the
    line, or set DataLoader(timeout=...) to make a stuck worker an error.

    Changes: With a timeout, a slow batch ends the run instead of holding it up.

    Leaves: Uneven amounts of data per rank, which end in another wait at the end of an epoch.

    ## When it is not a defect
    The stack of the rank shows it outside of the data loader.

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
