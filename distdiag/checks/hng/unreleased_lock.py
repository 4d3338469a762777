"""HNG011: a rank waits for a lock, a queue, a thread or a future while the job stands still."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnreleasedLock(StuckRank):
    """A rank waits for a lock, a queue, a thread or a future while the job stands still.

    ## What it detects
    The ranks that the job waits for are blocked on something inside their own process or
    between processes of the node: `Lock.acquire`, `Thread.join`, `Queue.get`, `Future.result`,
    a file lock, a semaphore; they have not moved for the hang threshold.

    ## Why it matters
    No timeout of a process group names such a wait: the others only see that this rank does not
    come.

    ## Example
    A thread dies with an exception, and the main thread waits for its answer in a queue.

    ## How to fix
    Look at the line and at the other threads of the rank in the evidence: who should release,
    put or set, and does it still run?

    ## References
    - `threading`, `queue`, `concurrent.futures`
    """

    code = "HNG011"
    name = "unreleased-lock"
    severity = Severity.ERROR
    activities = frozenset({Activity.LOCK})
    instead = "waits for a lock, a queue or a thread"

    why = (
        "What would release it has ended, waits for this rank itself, or was copied by a fork "
        "while somebody held it."
    )
    fix = (
        "Give the wait a timeout so that it becomes an error with a line, and let the other side "
        "release it in a finally block; start helper processes before threads, or by spawn."
    )
    fix_changes = "A timeout turns a long wait into an error."
    fix_leaves = "What ended the other side."
    disproof = "The other thread or process still runs and is about to release it."
