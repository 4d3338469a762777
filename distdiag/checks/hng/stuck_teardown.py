"""HNG010: a rank is stuck while it shuts down."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckTeardown(StuckRank):
    """A rank is stuck while it shuts down.

    ## What you see
    The training is done, but the processes do not exit and keep their GPUs. The shutdown waits for
    something that still runs: a collective whose peers have not come, a thread, or a worker
    process.

    ## Example
        # wrong: a thread that is never stopped keeps the interpreter from its end
        watcher = threading.Thread(target=watch)
        watcher.start()
        dist.destroy_process_group()

        # right
        stop.set()
        watcher.join()
        dist.destroy_process_group()

    ## How to fix
    Call `dist.destroy_process_group()` on every rank at the same point, and before it wait for
    everything that still runs: `work.wait()`, `thread.join()`, `pool.shutdown()`.

    Changes: The end of the job waits for what is still running.

    Leaves: Errors that happened before the shutdown began.

    ## When it is not a defect
    The process ends by itself.

    To silence it, set `ignore = ["HNG010"]` in `distdiag.toml`.

    ## References
    - https://github.com/lincc-frameworks/hyrax/issues/1011
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.destroy_process_group
    """

    code = "HNG010"
    name = "stuck-teardown"
    severity = Severity.ERROR
    activities = frozenset({Activity.TEARDOWN})
    instead = "is shutting down"
