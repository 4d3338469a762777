"""HNG013: a rank waits for a child process while the job stands still."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnfinishedChildProcess(StuckRank):
    """A rank waits for a child process while the job stands still.

    ## What you see
    The rank waits for a process that it started, and the other ranks wait for this rank. A child
    process never answers if it was killed, if it waits until its full pipe is read, or if it
    inherited a lock that was held.

    ## Example
        # wrong: nobody reads stderr; it fills, and both sides wait
        decoder = Popen(command, stdout=PIPE, stderr=PIPE)
        frames = decoder.stdout.read()

        # right: reads all pipes, and has an end
        decoder = Popen(command, stdout=PIPE, stderr=PIPE)
        frames, complaints = decoder.communicate(timeout=120)

    ## How to fix
    Read all pipes of the child and give the wait a limit: `process.communicate(timeout=120)`. For
    processes of `multiprocessing`, start them with the method `spawn`, or before any thread.

    Changes: A timeout turns a long wait into an error.

    Leaves: What the child itself was stuck in.

    ## When it is not a defect
    The child is working and will end by itself.

    To silence it, set `ignore = ["HNG013"]` in `distdiag.toml`.

    ## References
    - https://github.com/lenskit/lkpy/issues/290
    - https://github.com/Zulko/moviepy/issues/576
    - https://docs.python.org/3/library/subprocess.html#subprocess.Popen.communicate
    """

    code = "HNG013"
    name = "unfinished-child-process"
    severity = Severity.ERROR
    activities = frozenset({Activity.CHILD_PROCESS})
    instead = "waits for a process that it started"
