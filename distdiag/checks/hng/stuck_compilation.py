"""HNG008: a rank compiles, or waits for the lock of a build, while the others wait for it."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckCompilation(StuckRank):
    """A rank compiles, or waits for the lock of a build, while the others wait for it.

    ## What you see
    The other ranks wait in a collective while this rank compiles, which takes seconds to minutes,
    or waits for a build. A lock file that a killed build left behind stops every later start for
    ever.

    ## Example
        # wrong: every new length is compiled anew, on one rank only
        step = torch.compile(train_step)
        step(batch)

        # right: lengths are dynamic
        torch._dynamo.mark_dynamic(batch, 1)
        step(batch)

    ## How to fix
    If the stack shows `FileBaton.wait`, make sure that no build is running and delete the file
    `lock` in the build folder. Otherwise run with `TORCH_LOGS=recompiles` to see why this rank
    compiles alone, and mark changing sizes with `torch._dynamo.mark_dynamic(batch, 1)`.

    Changes: The extension is built again by the first rank that comes.

    Leaves: Other stale locks in the same folder.

    ## When it is not a defect
    The compilation ends by itself and the job continues.

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
