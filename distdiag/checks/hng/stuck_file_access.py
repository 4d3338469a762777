"""HNG005: a rank waits for a file system while the job stands still."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckFileAccess(StuckRank):
    """A rank waits for a file system while the job stands still.

    ## What it detects
    The ranks that the others wait for are inside a system call on a file (open, read, flock,
    fsync, ...) or in uninterruptible sleep, and have not moved for the hang threshold. The
    evidence names the file and the type of its file system where the kernel tells.

    ## Why it matters
    A file server that does not answer stops every process that touches it, and looks like a
    hang of the network between the ranks.

    ## Example
    The mount of a bucket has died, and one node reads its shard of the validation set from it.

    ## How to fix
    Look at the file and its mount on the named node: `stat` it, look for the holder of the lock
    with `lslocks`, read the kernel log.

    ## References
    - `proc_pid_syscall(5)`, `proc_pid_wchan(5)`, `lslocks(8)`
    """

    code = "HNG005"
    name = "stuck-file-access"
    severity = Severity.ERROR
    activities = frozenset({Activity.FILE_ACCESS})
    instead = "waits for a file"

    why = (
        "The kernel lets a process wait for a file server, a lock or a pipe for as long as it "
        "takes; no timeout of a process group covers that."
    )
    fix = (
        "Look at the file in the evidence on the node of this rank: whether its mount answers "
        "(stat it), who holds its lock (lslocks), whether a pipe has a writer."
    )
    fix_changes = "Data from a local copy is read faster, and may be older."
    fix_leaves = "Other files on the same mount."
    disproof = "The file can be read on that node at once, and the rank has moved since."
