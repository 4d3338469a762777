"""Tests of configurations: templates of arguments, and which one brings a divergence in."""

import pytest

from distdiag.events.errors import UsageError
from distdiag.parity.configurations import evaluate, filled_in, in_order, origins


def test_a_template_is_filled_in():
    found = filled_in(
        "--batch-size {global_batch//world_size} --lr-steps {10*world_size}",
        global_batch=8,
        world_size=2,
    )
    assert found == ("--batch-size", "4", "--lr-steps", "20")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("rank", "'rank' is unknown"),
        ("__import__('os')", "is not allowed"),
        ("world_size ** 9", "is not allowed"),
        ("1.5", "is not allowed"),
        ("world_size // 0", "zero"),
        ("world_size +", "invalid syntax"),
    ],
)
def test_anything_else_is_one_clear_error(expression, said):
    with pytest.raises(UsageError, match="cannot be computed") as caught:
        evaluate(expression, {"world_size": 2})
    assert said in str(caught.value)


def test_an_open_brace_is_reported():
    with pytest.raises(UsageError, match="not closed"):
        filled_in("--batch-size {world_size", world_size=2)


def test_the_axis_that_differs_alone_is_the_origin_and_what_contains_it_is_not():
    found = origins({"ddp2": False, "tp2": True, "fsdp2": False, "fsdp2xtp2": True})
    assert [origin.label for origin in found] == ["tp2"]


def test_a_combination_may_be_the_origin():
    (found,) = origins({"tp2": False, "fsdp2": False, "fsdp2xtp2": True})
    assert found.phrase() == "fsdp2xtp2 brings the divergence in: tp2 and fsdp2 by themselves agree"


def test_nothing_differs_nothing_is_the_origin():
    assert origins({"tp2": False, "fsdp2xtp2": False}) == []


def test_two_axes_may_differ_each_by_itself():
    found = origins({"tp2": True, "fsdp2": True, "fsdp2xtp2": True})
    assert [origin.label for origin in found] == ["tp2", "fsdp2"]


def test_simple_configurations_run_first():
    assert in_order(["fsdp2xtp2", "tp2", "ddp2"]) == ["tp2", "ddp2", "fsdp2xtp2"]
