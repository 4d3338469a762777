import pytest

from distdiag.checks.col.root_mismatch import RootMismatch
from distdiag.events.ranks import RankSet
from tests.checks.streams import Job, signature
from tests.checks.verdicts import findings


def job_of(*roots, op="broadcast"):
    job = Job(len(roots))
    for rank in sorted(job.world, reverse=True):
        job.call(rank, sign=signature(op, root=roots[rank]))
    return job


def test_every_rank_that_names_itself_is_named():
    (finding,) = findings(RootMismatch, job_of(0, 1).alignment())
    assert finding.ranks == RankSet([0, 1])
    assert "rank 0 on rank 0, rank 1 on rank 1" in finding.message


def test_the_odd_one_of_four_is_named():
    (finding,) = findings(RootMismatch, job_of(0, 0, 0, 3).alignment())
    assert finding.ranks == RankSet([3])


@pytest.mark.parametrize("roots", [(0, 0), (0, None)])
def test_equal_and_unknown_roots_are_silent(roots):
    assert not findings(RootMismatch, job_of(*roots).alignment())


def test_an_operation_without_a_root_is_silent():
    assert not findings(RootMismatch, job_of(0, 1, op="all_reduce").alignment())
