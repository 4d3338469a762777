import pytest

from distdiag.alignment import Fate, Trigger
from distdiag.checks.rank_died import RankDied
from distdiag.finding import Severity
from distdiag.ranks import RankSet
from tests.checks.streams import TORCH, Job, raised, signature
from tests.checks.verdicts import serious


def judged(job):
    return list(RankDied().check_ranks(job.view()))


def die(job, rank, left_ns, status=None):
    job.set(rank, fate=Fate.DIED, left_ns=left_ns, exit_status=status)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_killed_rank_is_named_with_what_it_did_last(num_ranks):
    job = Job(num_ranks)
    job.every(step=3)
    die(job, 1, 5, -9)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])
    assert "died by SIGKILL" in finding.message
    assert "it had last called all_reduce #0" in finding.message


def test_those_that_the_launcher_stopped_afterwards_are_not_accused():
    job = Job(4)
    for rank, left_ns in ((3, 5), (0, 8), (1, 8), (2, 9)):
        die(job, rank, left_ns)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([3])


def test_a_rank_that_raised_before_is_the_cause():
    job = Job()
    job.set(0, fate=Fate.RAISED, raised=raised(0), left_ns=4)
    die(job, 1, 5)
    assert not judged(job)
    assert [f.code for f in serious(job.alignment(trigger=Trigger.ENDED, seq_id=0))] == ["HNG001"]


def test_an_error_about_the_lost_peer_does_not_excuse_the_death():
    job = Job()
    failed = raised(0, TORCH, "RuntimeError", "Connection closed by peer")
    job.set(0, fate=Fate.RAISED, raised=failed, left_ns=4)
    die(job, 1, 5)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])


def test_all_ranks_at_once_were_ended_from_outside():
    job = Job()
    die(job, 0, 5)
    die(job, 1, 5)
    (finding,) = judged(job)
    assert finding.severity is Severity.INFO


def test_an_abort_over_contradictory_collectives_is_a_note():
    job = Job()
    for rank in job.world:
        job.call(rank, sign=signature(numel=4 + rank))
    die(job, 1, 5, -6)
    (finding,) = judged(job)
    assert finding.severity is Severity.INFO


def test_both_ways_to_see_it_give_one_finding():
    job = Job()
    job.every()
    job.call(0)
    die(job, 1, 5)
    assert [f.code for f in serious(job.alignment(trigger=Trigger.LEFT))] == ["HNG002"]


def test_ranks_that_finished_are_silent():
    job = Job()
    job.set(0, 1, fate=Fate.FINISHED)
    assert not judged(job)
