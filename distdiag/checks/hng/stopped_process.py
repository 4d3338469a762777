"""HNG012: the process of a rank was stopped, by a signal or in a debugger."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StoppedProcess(StuckRank):
    """The process of a rank was stopped, by a signal or in a debugger.

    ## What you see
    The other ranks wait until somebody lets this process continue. A stopped process executes
    nothing, and nobody sees a debugger prompt on a rank without a terminal.

    ## Example
        # wrong: waits for the keyboard on one rank
        if loss.isnan():
            breakpoint()

        # right: an error with a line
        if loss.isnan():
            raise FloatingPointError(f"loss is {loss} in step {step}")

    ## How to fix
    Let the process continue (`kill -CONT PID`) or detach the debugger from it. Remove
    `breakpoint()`, `pdb.set_trace()` and `input()` from code that several ranks run.

    Changes: The process goes on where it was stopped.

    Leaves: Whoever stopped it may do so again.

    ## When it is not a defect
    The kernel shows the process as running.

    To silence it, set `ignore = ["HNG012"]` in `distdiag.toml`.

    ## References
    - https://man7.org/linux/man-pages/man7/signal.7.html
    - https://man7.org/linux/man-pages/man2/ptrace.2.html
    """

    code = "HNG012"
    name = "stopped-process"
    severity = Severity.ERROR
    activities = frozenset({Activity.STOPPED, Activity.DEBUGGER})
    instead = "was stopped"
