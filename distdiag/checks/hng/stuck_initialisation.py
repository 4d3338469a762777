"""HNG009: a rank is still setting up process groups while the job stands still."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckInitialisation(StuckRank):
    """A rank is still setting up process groups while the job stands still.

    ## What you see
    Creating a process group needs every rank of its parent. The store and the rendezvous wait up to
    their timeout, half an hour by default, without naming who is missing.

    ## Example
        # wrong: the configuration says 4, and 2 processes were started
        dist.init_process_group(rank=rank, world_size=config.world_size)

        # right: the launcher knows how many there are
        dist.init_process_group()

    ## How to fix
    Compare the world size, MASTER_ADDR and MASTER_PORT that each rank uses with the processes that
    run; let all ranks create the same groups in the same order.

    Changes: Ranks that were alone become members of one job.

    Leaves: Whatever kept the missing rank away.

    ## When it is not a defect
    All ranks have entered the same call, and it ends by itself.

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
