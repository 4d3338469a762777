"""HNG021: a rank asks a person, or waits for its standard input, and nobody answers."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnansweredQuestion(StuckRank):
    """A rank asks a person, or waits for its standard input, and nobody answers.

    ## What you see
    The rank waits for ever for an answer on its standard input, and the other ranks wait for this
    rank. Launchers run ranks without a terminal and show their output late or never, so nobody sees
    a question like "Overwrite? [y/n]".

    ## Example
        # wrong: rank 0 asks, the others wait for it in the next collective
        if os.path.exists(folder) and input("Overwrite? [y/n] ") != "y":
            sys.exit()

        # right: an option decides, and its absence is an error
        if os.path.exists(folder) and not args.overwrite:
            sys.exit("the folder exists: pass --overwrite")

    ## How to fix
    Take the answer from a command-line option or an environment variable instead of `input()`.
    Libraries that ask (for a login, or for trust in downloaded code) have an option for that too.

    Changes: Runs without the option end with an error instead of a question.

    Leaves: Other questions that come after this one.

    ## When it is not a defect
    Somebody is about to answer at this terminal.

    To silence it, set `ignore = ["HNG021"]` in `distdiag.toml`.

    ## References
    - https://docs.python.org/3/library/functions.html#input
    - https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    code = "HNG021"
    name = "unanswered-question"
    severity = Severity.ERROR
    activities = frozenset({Activity.PERSON})
    instead = "waits for an answer"
