"""What the tests of stuck ranks share: one rank is stuck at a line, another waits for it."""

from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Trigger
from tests.checks.streams import Job, Program, stacks
from tests.checks.verdicts import serious

SOURCE = "def main():\n    answer = ask()\n    loss.backward()"


def stuck_job(tmp_path, *inner, **state):
    """Rank 1 is at `ask()` with these frames inside it; rank 0 waits for it in an all_reduce."""
    p = Program(tmp_path, SOURCE)
    job = Job()
    job.every(p.site("backward"))
    job.call(0, p.site("backward"))
    job.set(0, idle_s=31.0)
    job.set(1, idle_s=31.0, stacks=stacks(1, *inner, p.frame("ask()")), **state)
    return job


def assert_alone_and_right(job, code):
    """The whole catalogue says one thing: this code, rank 1, the line where it stands."""
    (finding,) = serious(job.alignment(trigger=Trigger.STALLED))
    assert (finding.code, finding.ranks, finding.location.line) == (code, RankSet([1]), 2)
    assert finding.evidence
    return finding


def assert_left_to(job, code):
    """Another check speaks instead."""
    assert [f.code for f in serious(job.alignment(trigger=Trigger.STALLED))] == [code]
