"""HNG005: a rank waits for a file system while the job stands still."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class StuckFileAccess(StuckRank):
    """A rank waits for a file system while the job stands still.

    ## What you see
    It looks like a hang of the network between the ranks, and no timeout of a process group covers
    it: a file server that does not answer, a lock, or a pipe without a writer stops whoever touches
    the file.

    ## Example
        # wrong: every step reads from a mount that may stop to answer
        batch = torch.load(f"/mnt/bucket/shard-{step}.pt")

        # right: copied to the local disk before training begins
        shutil.copytree("/mnt/bucket", "/local/data")
        batch = torch.load(f"/local/data/shard-{step}.pt")

    ## How to fix
    Look at the file on the node of this rank: does its mount answer (`df`), does somebody hold its
    lock (`lslocks`), has a pipe a writer? Copy what every step reads to the local disk.

    Changes: Data from a local copy is read faster, and may be older.

    Leaves: Other files on the same mount.

    ## When it is not a defect
    The file can be read on that node at once, and the rank has moved since.

    To silence it, set `ignore = ["HNG005"]` in `distdiag.toml`.

    ## References
    - https://github.com/GoogleCloudPlatform/gcsfuse/issues/1844
    - https://github.com/asmvik/skhd/issues/83
    - https://man7.org/linux/man-pages/man5/proc_pid_syscall.5.html
    - https://man7.org/linux/man-pages/man8/lslocks.8.html
    """

    code = "HNG005"
    name = "stuck-file-access"
    severity = Severity.ERROR
    activities = frozenset({Activity.FILE_ACCESS})
    instead = "waits for a file"
