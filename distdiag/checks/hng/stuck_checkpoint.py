"""HNG007: a rank saves or loads a checkpoint while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckCheckpoint(StuckRank):
    """A rank saves or loads a checkpoint while the others wait for it.

    ## What you see
    The others wait in a collective whose timeout counts the time of the checkpoint: what this rank
    reads or writes takes longer than that, and a slow file server ends the job.

    ## Example
        # wrong: the others time out while rank 0 writes everything
        if rank == 0:
            torch.save(full_state, "/mnt/slow/model.pt")
        dist.barrier()

        # right: every rank writes its part, in the background
        future = dcp.async_save(state, checkpoint_id="/mnt/slow/step-100")

    ## How to fix
    Look at the storage that this rank uses. Let all ranks write their part
    (torch.distributed.checkpoint), write asynchronously, or raise the timeout of the group.

    Changes: Asynchronous saving takes memory for a copy of the state.

    Leaves: A file system that is slow for everybody else.

    ## When it is not a defect
    The checkpoint is complete and the rank is elsewhere.

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
