import pytest

from distdiag.engine.collectives.traffic import Surplus, carried_bytes, element_bytes
from distdiag.events.collectives import Signature
from tests.checks.streams import Job


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("torch.bfloat16", 2),
        ("int64", 8),
        ("uint8", 1),
        ("bool", 1),
        ("complex64", 8),
        ("complex128", 16),
        ("float8_e4m3fn", 1),
    ],
)
def test_how_large_an_element_is(dtype, size):
    assert element_bytes(dtype) == size


def carried(op, ranks=(0, 1), world=3, **values):
    job = Job(world)
    sign = Signature(op, dtypes=("float32",), **values)
    return carried_bytes(job.call(0, sign=sign), frozenset(ranks))


def test_the_larger_side_of_a_call_counts():
    sizes = {"input_sizes": ((4,),), "output_sizes": ((4,), (8,))}
    assert carried("all_gather", **sizes) == 48


def test_what_only_one_rank_gets_does_not_count():
    assert carried("gather", input_sizes=((4,),), root=0) == 0


def test_a_message_counts_for_its_two_ranks():
    assert carried("send", input_sizes=((4,),), peer=1) == 16
    assert carried("send", input_sizes=((4,),), peer=2) == 0


def test_a_surplus_is_what_one_later_step_carries_more():
    surplus, job = Surplus(3), Job(3)

    def add(step, size, group=(0, 1), rank=0):
        sign = Signature("all_reduce", ((size,),), (), ("float32",))
        ranks = job.group(group, f"{group}")
        surplus.add(job.call(rank, group=ranks, sign=sign, step=step))

    for step, size in ((0, 90), (1, 10), (2, 10), (2, 10), (3, 20), (4, 20), (4, 5)):
        add(step, size)
    add(4, 50, group=(1, 2), rank=1)
    assert surplus.between(frozenset((0, 1))) == 5 * 4
    assert surplus.between(frozenset((1, 2))) == 50 * 4
    assert surplus.between(frozenset((0, 2))) == 0
