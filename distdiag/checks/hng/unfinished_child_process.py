"""HNG013: a rank waits for a child process while the job stands still."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnfinishedChildProcess(StuckRank):
    """A rank waits for a child process while the job stands still.

    ## What it detects
    The ranks that the job waits for are blocked on a process that they started: `subprocess`, a
    pool, a pipe that a child should fill; they have not moved for the hang threshold.

    ## Why it matters
    The others only see that this rank does not come; what the child waits for is nowhere to be
    seen.

    ## Example
    A decoder is started with a pipe for its messages that nobody reads: it fills, and both
    sides wait.

    ## How to fix
    Look at the child in the evidence: what does it wait for? Read all its pipes
    (`communicate`), start it before threads, by spawn.

    ## References
    - `subprocess.Popen.communicate`, `multiprocessing.set_start_method`
    """

    code = "HNG013"
    name = "unfinished-child-process"
    severity = Severity.ERROR
    activities = frozenset({Activity.CHILD_PROCESS})
    instead = "waits for a process that it started"

    why = (
        "A child that was killed, that waits for its full pipe to be read, or that inherited a "
        "held lock never answers."
    )
    fix = (
        "Look at the child's state in the evidence; read all of its pipes with communicate(), "
        "give the wait a timeout, and start children by spawn or before any thread."
    )
    fix_changes = "A timeout turns a long wait into an error."
    fix_leaves = "What the child itself was stuck in."
    disproof = "The child works and will end by itself."
