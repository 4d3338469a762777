from msgspec.structs import replace

from distdiag.checks.bar.divergent_existence_test import DivergentExistenceTest
from distdiag.events.ranks import RankSet
from tests.checks.races import access
from tests.checks.streams import Job, plain_site, together
from tests.checks.verdicts import findings


def judged(job, found, seqs=(-1, -1, -1)):
    tests = [access(rank, "test", plain_site(5), found=answer) for rank, answer in enumerate(found)]
    events = [replace(each.event, seq=seqs[rank]) for rank, each in enumerate(tests)]
    return findings(DivergentExistenceTest, together(*events, states=job.view().states))


def test_ranks_that_part_after_the_test_are_named():
    job = Job(3)
    job.call(0, plain_site(6), op="barrier")
    job.call(1, plain_site(6), op="barrier")
    job.call(2, plain_site(9), op="all_reduce")
    (finding,) = judged(job, (False, False, True))
    assert (finding.ranks, finding.location.line) == (RankSet([2]), 5)
    assert "exists for rank 2 and not for ranks 0-1" in finding.message


def test_ranks_that_meet_in_the_same_collective_are_silent():
    job = Job(2)
    job.every(plain_site(6), op="barrier")
    assert not judged(job, (False, True))


def test_ranks_with_one_answer_are_silent():
    job = Job(2)
    job.call(0, plain_site(6), op="barrier")
    assert not judged(job, (True, True))


def test_a_rank_that_tests_behind_the_barrier_of_the_first_is_silent():
    job = Job(2)
    job.call(1, plain_site(6), op="barrier")
    job.call(1, plain_site(9), op="all_reduce")
    job.call(0, plain_site(6), op="barrier")
    job.call(0, plain_site(9), op="all_reduce")
    assert not judged(job, (False, True), seqs=(-1, 0.5))
