"""Under a real launcher, tokens that weigh otherwise than they should are found, and only they."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("weighing.py")

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("nothing", None),
        ("own-mean", "PAR001"),
        ("divided-again", "PAR002"),
        ("ranks-twice", "PAR002"),
        ("unshifted", "PAR003"),
    ],
)
def test_a_fault_of_weights_is_found_at_its_backward_pass(fault, code):
    run = run_checked(SCRIPT, [fault])
    assert run.exit_status == 0 or run.aborted_at_exit, run.describe()
    loud = [each for each in run.report["findings"] if each["severity"] != "info"]
    assert [each["code"] for each in loud] == ([code] if code else []), run.describe()
    for finding in loud:
        assert finding["location"]["source"] == "loss.backward()"
        assert finding["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [("alone-times", [[0], [1]]), pytest.param("alone", [], marks=pytest.mark.slow)],
)
def test_a_factor_that_counts_ranks_of_a_model_is_found(fault, ranks):
    run = run_checked(SCRIPT, [fault])
    assert run.exit_status == 0 or run.aborted_at_exit, run.describe()
    loud = [each for each in run.report["findings"] if each["severity"] != "info"]
    assert {each["code"] for each in loud} == ({"PAR013"} if ranks else set()), run.describe()
    assert sorted(each["ranks"] for each in loud) == ranks
