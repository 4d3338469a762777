import pytest

from distdiag.alignment import Fate, Trigger
from distdiag.checks.rank_raised import RankRaised
from distdiag.event import Frame
from distdiag.finding import Severity
from distdiag.ranks import RankSet
from tests.checks.streams import TORCH, Job, plain_site, raised, signature
from tests.checks.verdicts import serious

LINE = Frame("train.py", 7, "main")
CLOSED = "[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:3141"


def fail(job, rank, left_ns, frame=LINE, kind="ValueError", message="bad"):
    failed = raised(rank, frame, kind, message)
    job.set(rank, fate=Fate.RAISED, raised=failed, left_ns=left_ns)


def judged(job):
    return list(RankRaised().check_ranks(job.view()))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_exception_that_others_wait_behind_is_named(num_ranks):
    job = Job(num_ranks)
    for rank in job.world - RankSet([1]):
        job.call(rank)
    fail(job, 1, 5)
    (finding,) = judged(job)
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 7)
    assert "ValueError: bad" in finding.message


@pytest.mark.parametrize("message", [CLOSED, "Timed out waiting 1000ms", "Broken pipe"])
def test_errors_about_a_lost_peer_are_consequences_even_when_they_come_first(message):
    job = Job(3)
    job.every()
    fail(job, 2, 9)
    for rank in (0, 1):
        fail(job, rank, 5, TORCH, "RuntimeError", message)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([2])


def test_the_earlier_of_two_exceptions_is_the_cause():
    job = Job(3)
    job.call(2)
    fail(job, 0, 9, Frame("train.py", 50, "main"), "KeyError")
    fail(job, 1, 5)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])


def test_the_same_exception_on_all_ranks_is_a_note():
    job = Job()
    fail(job, 0, 5)
    fail(job, 1, 9)
    (finding,) = judged(job)
    assert (finding.ranks, finding.severity) == (RankSet([0, 1]), Severity.INFO)


def test_a_rank_that_still_runs_may_be_about_to_raise_the_same():
    job = Job()
    fail(job, 0, 5)
    assert not judged(job)
    job.set(1, fate=Fate.DIED, left_ns=9)
    assert judged(job)


def test_an_interruption_by_the_user_is_a_note():
    job = Job()
    fail(job, 0, 5, kind="KeyboardInterrupt", message="")
    job.set(1, fate=Fate.DIED, left_ns=9)
    (finding,) = judged(job)
    assert finding.severity is Severity.INFO


def test_an_error_of_a_contradictory_collective_is_left_to_that_contradiction():
    job = Job()
    for rank in job.world:
        job.call(rank, sign=signature(numel=4 + rank))
    fail(job, 0, 5, TORCH, "RuntimeError", "op.preamble.length <= op.nbytes. 20 vs 16")
    assert not judged(job)
    assert [f.code for f in serious(job.alignment())] == ["COL003"]


def test_an_error_in_the_user_s_own_line_is_no_consequence_of_an_earlier_contradiction():
    job = Job()
    for rank in job.world:
        job.call(rank, sign=signature(reduce_op="SUM" if rank else "MAX"))
    job.call(1)
    fail(job, 0, 5)
    assert [f.ranks for f in judged(job)] == [RankSet([0])]


def test_both_ways_to_see_it_give_one_finding():
    job = Job()
    job.call(0, plain_site(3))
    fail(job, 1, 5)
    alignment = job.alignment(trigger=Trigger.LEFT)
    (early,) = RankRaised().check_missing(alignment)
    (late,) = judged(job)
    assert early.identity == late.identity


def test_no_exception_is_silent():
    job = Job()
    job.every()
    job.set(0, 1, fate=Fate.FINISHED)
    assert not judged(job)
