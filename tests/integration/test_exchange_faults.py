"""Exchanges of tokens that do not fit, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("exchange_faults.py")

pytestmark = pytest.mark.timeout(300)


def findings(fault):
    outcome = run_checked(SCRIPT, [fault])
    assert outcome.report is not None, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    found = {finding["code"]: finding for finding in outcome.report["findings"]}
    assert "DIA003" not in found, outcome.describe()
    return found


def test_capacities_that_differ_are_reported_with_their_numbers():
    found = findings("local")
    assert found["MOE011"]["severity"] == "error"
    assert "16 rows to each rank (8 for each expert) on rank 0" in found["MOE011"]["message"]
    assert "18 rows to each rank (9 for each expert) on rank 1" in found["MOE011"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["agreed", "splits"])
def test_exchanges_that_fit_are_silent(fault):
    assert all(finding["severity"] == "info" for finding in findings(fault).values())


@pytest.mark.slow
def test_splits_that_do_not_fit_name_sender_and_receiver():
    found = findings("wrong")
    assert "rank 1 sends 40 rows to rank 0, which expects 41" in found["MOE003"]["message"]


@pytest.mark.slow
def test_tokens_that_do_not_come_back_are_reported():
    found = findings("lossy")
    assert found["MOE003"]["severity"] == "warning"
    assert "and gets 8 back" in found["MOE003"]["message"]
