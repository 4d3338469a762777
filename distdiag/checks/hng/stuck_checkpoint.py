"""HNG007: a rank saves or loads a checkpoint while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckCheckpoint(StuckRank):
    """A rank saves or loads a checkpoint while the others wait for it.

    ## What you see
    The other ranks wait in a collective while this rank reads or writes a checkpoint, and the job
    ends if that takes longer than the timeout of the collective. Slow storage is the usual cause.

    ## Example
        # wrong: the others time out while rank 0 writes everything
        if rank == 0:
            torch.save(full_state, "/mnt/slow/model.pt")
        dist.barrier()

        # right: every rank writes its part, in the background
        future = dcp.async_save(state, checkpoint_id="/mnt/slow/step-100")

    ## How to fix
    Let every rank write its own part with `torch.distributed.checkpoint` (`dcp.save`, or
    `dcp.async_save` in the background). Or raise the timeout of the group:
    `dist.init_process_group(timeout=timedelta(hours=2))`. Check the storage that this rank uses.

    Changes: Asynchronous saving takes memory for a copy of the state.

    Leaves: A file system that is slow for everybody else.

    ## When it is not a defect
    The checkpoint is complete and the rank is at another line.

    To silence it, set `ignore = ["HNG007"]` in `distdiag.toml`.

    ## References
    - https://github.com/mosaicml/llm-foundry/issues/733
    - https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    code = "HNG007"
    name = "stuck-checkpoint"
    severity = Severity.WARNING
    activities = frozenset({Activity.CHECKPOINT})
    instead = "is saving or loading a checkpoint"
