"""HNG009: a rank is still setting up process groups while the job stands still."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckInitialisation(StuckRank):
    """A rank is still setting up process groups while the job stands still.

    ## What you see
    The job waits while process groups are set up, half an hour by default, and no message names the
    missing rank. Creating a process group needs every rank of the job.

    ## Example
        # wrong: the configuration says 4, and 2 processes were started
        dist.init_process_group(rank=rank, world_size=config.world_size)

        # right: the launcher knows how many there are
        dist.init_process_group()

    ## How to fix
    Start as many processes as the world size says, all with the same `MASTER_ADDR` and
    `MASTER_PORT`: let `torchrun` set them and call `dist.init_process_group()` without arguments of
    your own. Let all ranks call `dist.new_group(...)` for the same groups in the same order.

    Changes: Ranks that were alone become members of one job.

    Leaves: Whatever kept the missing rank away.

    ## When it is not a defect
    All ranks have entered the same call, and the call ends by itself.

    To silence it, set `ignore = ["HNG009"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/52848
    - https://github.com/pytorch/pytorch/issues/49846
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    """

    code = "HNG009"
    name = "stuck-initialisation"
    severity = Severity.ERROR
    activities = frozenset({Activity.INITIALISATION})
    instead = "is setting up a process group"
