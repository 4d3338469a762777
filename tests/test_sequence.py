"""Verification that a person asks for, on one rank: what it returns, refuses and raises."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import distdiag
from distdiag import sequence
from distdiag.events.errors import SequenceFaultError
from distdiag.probes.collectives.used_groups import ranks_of
from distdiag.record.marks import MARKED
from distdiag.sequence import FaultKind, verify


def same(x):
    return x


def test_what_changes_nothing_is_right():
    verdict = verify(same, same, length=8, heads=2, reduction="sum")
    assert verdict.ok
    assert verdict.faults == ()
    verdict.raise_on_fault()
    assert str(verdict) == "the tokens of rank 0 came through as they should"


def test_a_fault_is_raised_only_on_request():
    verdict = verify(same, lambda part: part.flip(1), length=8, backward=False)
    assert [fault.kind for fault in verdict.faults] == [FaultKind.PERMUTED]
    with pytest.raises(SequenceFaultError, match="gather, rank 0: tokens 0-7 came in reverse"):
        verdict.raise_on_fault()


def test_a_function_that_raises_is_reported_with_its_stage():
    def broken(part):
        raise RuntimeError("no such group")

    verdict = verify(same, broken, length=8)
    (fault,) = verdict.faults
    assert fault.kind is FaultKind.RAISED
    assert not verdict.ok
    assert fault.stage == "gather"
    assert "RuntimeError: no such group" in fault.said


def test_what_returns_no_tensor_is_reported():
    (fault,) = verify(lambda x: (x, x), same, length=8).faults
    assert "returned tuple, not a tensor" in fault.said


def test_random_numbers_and_modes_are_left_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with torch.no_grad():
        verify(lambda x: x + 0 * torch.rand_like(x), same, length=8)
        assert not torch.is_grad_enabled()
    assert torch.rand(1) == expected


def test_a_function_under_no_grad_has_no_way_back():
    verdict = verify(torch.no_grad()(lambda x: x * 1), same, length=8)
    assert [fault.kind for fault in verdict.faults] == [FaultKind.GRADIENT]
    assert verify(torch.no_grad()(lambda x: x * 1), same, length=8, backward=False).ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 8193}, "at most 8192 tokens"),
        ({"length": 8, "dim": 3}, "has no dim 3"),
        ({"length": 8, "documents": (3, 4)}, "documents of 7 tokens do not fill 8"),
        ({"length": 8, "dtypes": (torch.bool,)}, "cannot be numbered in bool"),
        ({"length": 1000, "attention": max}, "at most 1024 tokens"),
        ({"length": 8, "hidden": 0, "attention": max}, "hidden dimension"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        verify(same, same, **options)


def test_marked_functions_stay_themselves():
    before = dict(MARKED)
    try:
        assert distdiag.splits_sequence(dim=0, name="mine")(same) is same
        assert distdiag.gathers_sequence(dim=0, name="mine")(same) is same
        assert MARKED["split", "mine"].dim == 0
    finally:
        MARKED.clear()
        MARKED.update(before)


def test_the_names_of_the_module_exist():
    assert distdiag.sequence is sequence
    assert sequence.__all__ == sorted(sequence.__all__)
    assert [name for name in sequence.__all__ if not hasattr(sequence, name)] == []


@pytest.fixture
def two_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD, dist.new_group([0])
    dist.destroy_process_group()


def test_the_group_is_the_one_that_was_used(two_groups):
    def gather(part):
        dist.barrier(two_groups[1])
        return part

    assert verify(same, gather, length=8).ok
    assert verify(same, gather, length=8, group=two_groups[0]).ranks == (0,)


@pytest.mark.parametrize(
    "group", [[2, 3], (2, 3), lambda: [2, 3], SimpleNamespace(mesh=torch.tensor([2, 3]))]
)
def test_ranks_of_whatever_a_program_keeps_as_its_group(group):
    assert ranks_of(group) == (2, 3)
