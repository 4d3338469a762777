import pytest

from distdiag.checks.col.reduce_op_mismatch import ReduceOpMismatch
from distdiag.events.ranks import RankSet
from tests.checks.streams import Job, signature
from tests.checks.verdicts import findings


def job_of(*ops, op="all_reduce"):
    job = Job(len(ops))
    for rank in sorted(job.world, reverse=True):
        job.call(rank, sign=signature(op, reduce_op=ops[rank]))
    return job


def test_the_rank_with_another_operation_is_named():
    (finding,) = findings(ReduceOpMismatch, job_of("SUM", "MAX", "SUM", "SUM").alignment())
    assert finding.ranks == RankSet([1])
    assert "SUM on ranks 0,2-3, MAX on rank 1" in finding.message


def test_two_ranks_are_both_named():
    (finding,) = findings(ReduceOpMismatch, job_of("AVG", "SUM").alignment())
    assert finding.ranks == RankSet([0, 1])


@pytest.mark.parametrize("ops", [("SUM", "SUM"), ("SUM", None), (None, None)])
def test_equal_and_unknown_operations_are_silent(ops):
    assert not findings(ReduceOpMismatch, job_of(*ops).alignment())


def test_an_operation_that_reduces_nothing_is_silent():
    assert not findings(ReduceOpMismatch, job_of("SUM", "MAX", op="broadcast").alignment())
