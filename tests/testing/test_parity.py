"""What counts as the same on one rank and on several, and what a difference is said to be."""

import math

import pytest

from distdiag.testing.parity import parity_problem, replicas_problem
from distdiag.testing.parity_fixtures import loss_parity
from distdiag.testing.plan import Measured


def losses(*values, dtype="float32"):
    return Measured(values={"loss": list(values)}, dtypes={"loss": dtype}, series=("loss",))


def problem(base, other, noise=None, rtol="auto", world_size=4):
    return parity_problem(base, other, noise, rtol=rtol, world_size=world_size)


@pytest.mark.parametrize(
    ("factor", "phrase"),
    [
        (4.0, "the world size: a sum"),
        (0.25, "1 / the world size"),
        (2.0, "the square root of the world size"),
        (0.5, "1 / the square root"),
        (3.0, "their ratio is 3"),
    ],
)
def test_a_common_ratio_is_named(factor, phrase):
    said = problem(losses(1.0, 0.5), losses(factor, 0.5 * factor))
    assert phrase in said
    assert "loss at step 0" in said or "loss at step 1" in said


def test_values_without_a_common_ratio_say_so():
    assert "no common ratio" in problem(losses(1.0, 1.0, 1.0), losses(1.0, 1.5, 0.2))


@pytest.mark.parametrize(
    ("dtype", "difference", "is_same"),
    [
        ("float32", 1e-6, True),
        ("float32", 1e-4, False),
        ("float64", 1e-6, False),
        ("bfloat16", 1e-2, True),
        ("int64", 1e-6, False),
    ],
)
def test_the_room_for_rounding_depends_on_the_dtype(dtype, difference, is_same):
    base, other = losses(1.0, dtype=dtype), losses(1.0 + difference, dtype=dtype)
    assert (problem(base, other) is None) == is_same


def test_what_two_equal_runs_differ_is_allowed():
    base, other, again = losses(1.0), losses(1.004), losses(1.001)
    assert problem(base, other) is not None
    assert problem(base, other, noise=again) is None


def test_nan_on_one_side_only_differs_and_on_both_does_not():
    assert problem(losses(math.nan), losses(math.nan)) is None
    assert problem(losses(1.0), losses(math.nan)) is not None


def test_another_number_of_steps_differs():
    assert problem(losses(1.0, 1.0), losses(1.0)) is not None


def test_replicas_that_disagree_are_reported_before_anything_else():
    assert replicas_problem({0: losses(1.0), 1: losses(1.0)}) is None
    assert "rank 1" in replicas_problem({0: losses(1.0), 1: losses(2.0)})


def test_loss_parity_compares_with_the_smallest_world_size():
    loss_parity({2: [1.0, 0.5], 4: [1.0, 0.5]})
    with pytest.raises(pytest.fail.Exception, match="world size 4 against 2"):
        loss_parity({2: [1.0, 0.5], 4: [2.0, 1.0]})
