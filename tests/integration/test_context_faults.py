"""Torch's context parallelism, used rightly or wrongly, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("context_faults.py")

pytestmark = pytest.mark.timeout(300)


def findings(*args):
    outcome = run_checked(SCRIPT, list(args))
    found = outcome.reported()
    assert "SEQ011" in outcome.report["checked"], outcome.describe()
    return found


def test_positions_that_begin_anew_on_each_rank_are_reported():
    found = findings("placed")
    assert set(found) == {"SEQ011"}
    assert found["SEQ011"]["ranks"] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
@pytest.mark.parametrize(("fault", "code"), [("shifted", "SEQ007"), ("whole", "SEQ005")])
def test_each_fault_is_reported_by_its_check_alone(fault, code, rotate):
    assert set(findings(fault, rotate)) == {code}


@pytest.mark.slow
def test_samples_that_differ_are_reported():
    assert set(findings("mixed")) == {"SEQ006"}


@pytest.mark.slow
@pytest.mark.parametrize("args", [("right",), ("right", "allgather"), ("unbalanced",)])
def test_what_is_split_rightly_is_seen_and_not_accused(args):
    assert findings(*args) == {}
