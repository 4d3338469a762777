"""HNG011: a rank waits for a lock, a queue, a thread or a future while the job stands still."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnreleasedLock(StuckRank):
    """A rank waits for a lock, a queue, a thread or a future while the job stands still.

    ## What you see
    The rank waits for a lock, a queue, a thread or a future, and the other ranks wait for this
    rank. The thread or process that should end the wait has ended, waits for this rank, or the lock
    was copied by a fork while another thread held it.

    ## Example
        # wrong: if the reading thread dies, this waits for ever
        batch = queue.get()

        # right: the wait becomes an error with a line
        batch = queue.get(timeout=120)

    ## How to fix
    Give the wait a limit so that it becomes an error with a line (`queue.get(timeout=120)`,
    `lock.acquire(timeout=120)`), and release locks by `with lock:`. Start helper processes before
    threads, or with the method `spawn`.

    Changes: A timeout turns a long wait into an error.

    Leaves: What ended the other side.

    ## When it is not a defect
    The other thread or process still runs and is about to release the lock or to answer.

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
