import pytest

from distdiag.checks.col.collective_dtype_mismatch import CollectiveDtypeMismatch
from distdiag.events.ranks import RankSet
from tests.checks.streams import Job, signature
from tests.checks.verdicts import findings


def job_of(*dtypes, op="all_reduce"):
    job = Job(len(dtypes))
    for rank in sorted(job.world, reverse=True):
        job.call(rank, sign=signature(op, dtypes=dtypes[rank]))
    return job


def test_the_rank_outside_of_autocast_is_named():
    job = job_of(("bfloat16",), ("bfloat16",), ("float32",), ("bfloat16",))
    (finding,) = findings(CollectiveDtypeMismatch, job.alignment())
    assert finding.ranks == RankSet([2])
    assert "bfloat16 on ranks 0-1,3, float32 on rank 2" in finding.message


def test_two_ranks_are_both_named():
    (finding,) = findings(CollectiveDtypeMismatch, job_of(("float32",), ("float64",)).alignment())
    assert finding.ranks == RankSet([0, 1])


@pytest.mark.parametrize(
    "dtypes", [[("float32",)] * 2, [("float32",), ()], [("float32",), ("float32", "float32")]]
)
def test_equal_and_unknown_dtypes_are_silent(dtypes):
    assert not findings(CollectiveDtypeMismatch, job_of(*dtypes).alignment())


def test_a_barrier_has_no_dtype():
    assert not findings(
        CollectiveDtypeMismatch, job_of(("float32",), ("uint8",), op="barrier").alignment()
    )


def test_a_message_and_its_receive_must_agree():
    job = Job()
    send = job.call(0, sign=signature("send", peer=1, dtypes=("float32",)))
    receive = job.call(1, sign=signature("recv", peer=0, dtypes=("int32",)))
    assert findings(CollectiveDtypeMismatch, job.message(send, receive))
