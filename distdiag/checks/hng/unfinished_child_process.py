"""HNG013: a rank waits for a child process while the job stands still."""

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnfinishedChildProcess(StuckRank):
    """A rank waits for a child process while the job stands still.

    ## What you see
    The other ranks only see that this one does not come. A child that was killed, that waits for
    its full pipe to be read, or that inherited a held lock never answers.

    ## Example
        # wrong: nobody reads stderr; it fills, and both sides wait
        decoder = Popen(command, stdout=PIPE, stderr=PIPE)
        frames = decoder.stdout.read()

        # right: reads all pipes, and has an end
        decoder = Popen(command, stdout=PIPE, stderr=PIPE)
        frames, complaints = decoder.communicate(timeout=120)

    ## How to fix
    Look at the child's state in the evidence; read all of its pipes with communicate(), give the
    wait a timeout, and start children by spawn or before any thread.

    Changes: A timeout turns a long wait into an error.

    Leaves: What the child itself was stuck in.

    ## When it is not a defect
    The child works and will end by itself.

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
