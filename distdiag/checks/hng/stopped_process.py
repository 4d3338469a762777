"""HNG012: the process of a rank was stopped, by a signal or in a debugger."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StoppedProcess(StuckRank):
    """The process of a rank was stopped, by a signal or in a debugger.

    ## What it detects
    The kernel says that the process is stopped (SIGSTOP, SIGTSTP, a debugger), or its main
    thread is in `breakpoint()` or waits for the keyboard, while the job stands still.

    ## Why it matters
    The others wait for a process that will not run again before somebody lets it.

    ## Example
    A `breakpoint()` was left in the code, under a condition that holds on one rank.

    ## How to fix
    Let it go on (`kill -CONT`), detach the debugger, or remove the breakpoint.

    ## References
    - `signal(7)`, `ptrace(2)`
    """

    code = "HNG012"
    name = "stopped-process"
    severity = Severity.ERROR
    activities = frozenset({Activity.STOPPED, Activity.DEBUGGER})
    instead = "was stopped"

    why = "A stopped process executes nothing, and a prompt that nobody sees is never answered."
    fix = (
        "Send SIGCONT to the process or detach what traces it; remove breakpoint() and input() "
        "from code that several ranks run."
    )
    fix_changes = "The process goes on where it was stopped."
    fix_leaves = "Whoever stopped it may do so again."
    disproof = "The kernel shows the process as running."
