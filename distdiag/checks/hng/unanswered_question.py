"""HNG021: a rank asks a person, or waits for its standard input, and nobody answers."""

from __future__ import annotations

from distdiag.checks.hng.stuck_rank import StuckRank
from distdiag.checks.shared.activities import Activity
from distdiag.findings.finding import Severity


class UnansweredQuestion(StuckRank):
    """A rank asks a person, or waits for its standard input, and nobody answers.

    ## What you see
    A question such as "Overwrite? [y/n]" waits for ever where nobody sees it: launchers run ranks
    without a terminal, and show their output late or not at all.

    ## Example
        # wrong: rank 0 asks, the others wait for it in the next collective
        if os.path.exists(folder) and input("Overwrite? [y/n] ") != "y":
            sys.exit()

        # right: an option decides, and its absence is an error
        if os.path.exists(folder) and not args.overwrite:
            sys.exit("the folder exists: pass --overwrite")

    ## How to fix
    Take the answer from an option or a variable of the environment. Libraries that ask (for a
    login, for trust in downloaded code) have such options too.

    Changes: Runs without the option end with an error instead of a question.

    Leaves: Other questions behind this one.

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
