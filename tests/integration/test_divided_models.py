"""What ranks that divide a model or its data should share is told; what may differ is not."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("divided_models.py")

pytestmark = pytest.mark.timeout(300)


def alarms(way):
    outcome = run_checked(SCRIPT, [way])
    assert outcome.report is not None, outcome.describe()
    return {each["code"]: set(each["subjects"]) for each in outcome.alarms}


@pytest.mark.parametrize(
    ("way", "code", "names"),
    [
        pytest.param("forgotten", "SHD004", {"first.weight", "second.weight"}),
        pytest.param("stages", "SHD006", set(), marks=pytest.mark.slow),
        pytest.param("whole", "SEQ012", {"head.bias", "head.weight"}, marks=pytest.mark.slow),
    ],
)
def test_what_ranks_should_share_is_reported(way, code, names):
    assert alarms(way) == {code: names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        *("shared", "zeros", "experts", "whole-norm", "weighed", "game", "tasks", "tables"),
        "own-clock",
    ],
)
def test_what_may_differ_is_not(way):
    assert alarms(way) == {}
