"""What ranks of one call must say alike: the dtype, the operation of a reduction, and the root."""

import pytest

from distdiag.checks.col.collective_dtype_mismatch import CollectiveDtypeMismatch
from distdiag.checks.col.reduce_op_mismatch import ReduceOpMismatch
from distdiag.checks.col.root_mismatch import RootMismatch
from distdiag.events.ranks import RankSet
from tests.checks.streams import Job, signature
from tests.checks.verdicts import findings

FIELDS = {
    CollectiveDtypeMismatch: ("dtypes", "all_reduce"),
    ReduceOpMismatch: ("reduce_op", "all_reduce"),
    RootMismatch: ("root", "broadcast"),
}
F32, F64, BF16, U8 = ("float32",), ("float64",), ("bfloat16",), ("uint8",)


def found(check, *values, op=None):
    field, usual = FIELDS[check]
    job = Job(len(values))
    for rank in sorted(job.world, reverse=True):
        job.call(rank, sign=signature(op or usual, **{field: values[rank]}))
    return findings(check, job.alignment())


@pytest.mark.parametrize(
    ("check", "values", "ranks", "words"),
    [
        (
            CollectiveDtypeMismatch,
            (BF16, BF16, F32, BF16),
            [2],
            "bfloat16 on ranks 0-1,3, float32 on rank 2",
        ),
        (CollectiveDtypeMismatch, (F32, F64), [0, 1], "float32 on rank 0, float64 on rank 1"),
        (ReduceOpMismatch, ("SUM", "MAX", "SUM", "SUM"), [1], "SUM on ranks 0,2-3, MAX on rank 1"),
        (ReduceOpMismatch, ("AVG", "SUM"), [0, 1], "AVG on rank 0, SUM on rank 1"),
        (RootMismatch, (0, 0, 0, 3), [3], "rank 0 on ranks 0-2, rank 3 on rank 3"),
        (RootMismatch, (0, 1), [0, 1], "rank 0 on rank 0, rank 1 on rank 1"),
    ],
)
def test_the_odd_one_of_four_or_both_of_two_are_named(check, values, ranks, words):
    (finding,) = found(check, *values)
    assert finding.ranks == RankSet(ranks)
    assert words in finding.message


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (CollectiveDtypeMismatch, (F32, F32)),
        (CollectiveDtypeMismatch, (F32, ())),
        (CollectiveDtypeMismatch, (F32, F32 * 2)),
        (ReduceOpMismatch, ("SUM", "SUM")),
        (ReduceOpMismatch, ("SUM", None)),
        (ReduceOpMismatch, (None, None)),
        (RootMismatch, (0, 0)),
        (RootMismatch, (0, None)),
    ],
)
def test_equal_and_unknown_values_are_silent(check, values):
    assert not found(check, *values)


@pytest.mark.parametrize(
    ("check", "values", "op"),
    [
        (CollectiveDtypeMismatch, (F32, U8), "barrier"),
        (ReduceOpMismatch, ("SUM", "MAX"), "broadcast"),
        (RootMismatch, (0, 1), "all_reduce"),
    ],
)
def test_an_operation_to_which_it_means_nothing_is_silent(check, values, op):
    assert not found(check, *values, op=op)


def test_a_message_and_its_receive_must_agree_on_the_dtype():
    job = Job()
    send = job.call(0, sign=signature("send", peer=1, dtypes=F32))
    receive = job.call(1, sign=signature("recv", peer=0, dtypes=("int32",)))
    assert findings(CollectiveDtypeMismatch, job.message(send, receive))
