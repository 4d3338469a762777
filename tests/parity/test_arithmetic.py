"""Tests of argument templates: whole numbers and nothing else."""

import pytest

from distdiag.events.errors import UsageError
from distdiag.parity.runs import evaluate, filled_in


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


def test_an_open_brace_is_told():
    with pytest.raises(UsageError, match="not closed"):
        filled_in("--batch-size {world_size", world_size=2)
