"""HNG011: a rank waits for a lock, a queue, a thread or a future while the job stands still."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnreleasedLock(StuckRank):
    """A rank waits for a lock, a queue, a thread or a future while the job stands still.

    ## What you see
    What would release it has ended, waits for this rank itself, or was copied by a fork while
    somebody held it. The other ranks only see that this one does not come.

    ## Example
        # wrong: if the reading thread dies, this waits for ever
        batch = queue.get()

        # right: the wait becomes an error with a line
        batch = queue.get(timeout=120)

    ## How to fix
    Give the wait a timeout so that it becomes an error with a line, and let the other side release
    it in a finally block; start helper processes before threads, or by spawn.

    Changes: A timeout turns a long wait into an error.

    Leaves: What ended the other side.

    ## When it is not a defect
    The other thread or process still runs and is about to release it.

    To silence it, set `ignore = ["HNG011"]` in `distdiag.toml`.

    ## References
    - https://github.com/RadarML/red-rover/issues/23
    - https://github.com/lenskit/lkpy/issues/290
    - https://docs.python.org/3/library/queue.html#queue.Queue.get
    """

    code = "HNG011"
    name = "unreleased-lock"
    severity = Severity.ERROR
    activities = frozenset({Activity.LOCK})
    instead = "waits for a lock, a queue or a thread"
