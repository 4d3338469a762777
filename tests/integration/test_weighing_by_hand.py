"""Losses are weighed where no wrapper combines gradients, but the program itself does."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("weighing_by_hand.py")

pytestmark = pytest.mark.timeout(300)


def loud(name):
    run = run_checked(SCRIPT, [name])
    assert run.exit_status == 0 or run.aborted_at_exit, run.describe()
    found = [each for each in run.report["findings"] if each["severity"] != "info"]
    return found, run.describe()


@pytest.mark.parametrize(
    ("name", "code", "what"),
    [
        ("own part added up", "PAR013", "own part of a sequence that ranks 0-1 share"),
        pytest.param("own part counted", "PAR013", "multiplied by 2", marks=pytest.mark.slow),
        pytest.param("context counted", "PAR013", "multiplied by 2", marks=pytest.mark.slow),
        pytest.param("heads counted", "PAR013", "multiplied by 2", marks=pytest.mark.slow),
        pytest.param("context divided", "PAR002", "all 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_a_loss_of_the_wrong_weight_is_found_at_its_backward_pass(name, code, what):
    found, shown = loud(name)
    assert [each["code"] for each in found] == [code], shown
    assert what in found[0]["message"]
    assert f"add up to {2 if code == 'PAR013' else 0.5}" in found[0]["message"]
    assert found[0]["location"]["source"] == "loss.backward()"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "own part averaged",
        "context averaged",
        "heads added up",
        "gathered",
        "mean of ranks",
        "data added up",
        "data averaged",
        "heavy",
        "own data added up",
        "clipped",
    ],
)
def test_right_programs_and_what_may_be_meant_are_silent(name):
    found, shown = loud(name)
    assert not found, shown
