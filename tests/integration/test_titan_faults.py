"""Experts of torchtitan that are trained wrongly, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

pytest.importorskip("torchtitan")

SCRIPT = Path(__file__).with_name("titan_faults.py")

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def findings(fault, tmp_path):
    outcome = run_checked(SCRIPT, [fault, "--out", str(tmp_path / "record")])
    assert outcome.report is not None, outcome.describe()
    found = {finding["code"]: finding for finding in outcome.report["findings"]}
    assert "DIA003" not in found, outcome.describe()
    return found


def test_a_bias_that_each_rank_updates_alone_is_reported(tmp_path):
    found = findings("biased", tmp_path)
    assert "expert_bias_E" in found["MOE013"]["message"]


def test_splits_of_functional_exchanges_that_do_not_fit_are_reported(tmp_path):
    assert "rank 0, which expects" in findings("splits", tmp_path)["MOE003"]["message"]
