"""HNG008: a rank compiles, or waits for the lock of a build, while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckCompilation(StuckRank):
    """A rank compiles, or waits for the lock of a build, while the others wait for it.

    ## What you see
    Compiling takes from seconds to minutes, and the others wait in a collective meanwhile. A lock
    file that a killed build has left behind holds up every later start for ever.

    ## Example
        # wrong: every new length is compiled anew, on one rank only
        step = torch.compile(train_step)
        step(batch)

        # right: lengths are dynamic
        torch._dynamo.mark_dynamic(batch, 1)
        step(batch)

    ## How to fix
    If it waits for a lock file (`FileBaton.wait`), make sure that no build runs and delete the file
    `lock` in the build folder. Otherwise find out why this rank compiles alone:
    TORCH_LOGS=recompiles names the guard that failed.

    Changes: The extension is built again by the first rank that comes.

    Leaves: Other stale locks in the same folder.

    ## When it is not a defect
    The compilation ends by itself and the job goes on.

    To silence it, set `ignore = ["HNG008"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/190543
    - https://docs.pytorch.org/docs/stable/cpp_extension.html
    - https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
    """

    code = "HNG008"
    name = "stuck-compilation"
    severity = Severity.WARNING
    activities = frozenset({Activity.COMPILATION})
    instead = "is compiling or waits for a build"
