"""Gradients of experts that are divided in all ways there are, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("expert_gradients.py")
SHARDED = Path(__file__).with_name("expert_gradients_fsdp.py")

pytestmark = pytest.mark.timeout(300)


def findings(script, *arguments, nproc=2):
    outcome = run_checked(script, list(arguments), nproc=nproc)
    assert outcome.report is not None, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    found = {finding["code"]: finding for finding in outcome.report["findings"]}
    assert "DIA003" not in found, outcome.describe()
    assert "MOE012" in outcome.report["checked"], outcome.describe()
    return found


def test_experts_that_nobody_divides_are_reported():
    found = findings(SCRIPT, "wrong", "Adam")
    assert found["MOE012"]["severity"] == "warning"
    assert "2 times as large" in found["MOE012"]["message"]
    assert "layers.0.expert.0.weight" in found["MOE012"]["subjects"]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["ddp", "bucket"])
def test_it_does_not_matter_who_averages_the_others(style):
    assert "2 times as large" in findings(SCRIPT, style)["MOE012"]["message"]


@pytest.mark.slow
def test_experts_that_are_divided_twice_are_reported():
    assert "2 times smaller" in findings(SCRIPT, "twice")["MOE012"]["message"]


@pytest.mark.slow
def test_different_experts_whose_gradients_are_added_up_are_reported():
    assert "different experts" in findings(SCRIPT, "mixed")["MOE012"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "style",
    ["divided", "hook-on-parameter", "exchange", "hook-between", "scale-function", "sum"],
)
def test_experts_that_are_divided_in_any_way_are_not(style):
    found = findings(SCRIPT, style)
    assert all(finding["severity"] == "info" for finding in found.values())
    assert "MOE012" not in found


@pytest.mark.slow
def test_experts_that_are_sharded_over_fewer_ranks_are_reported_without_a_divisor():
    found = findings(SHARDED, "wrong", nproc=4)
    assert "2 times as large" in found["MOE012"]["message"]
    assert "divided by 4, those of experts by 2" in found["MOE012"]["message"]
    assert "MOE012" not in findings(SHARDED, "factor", nproc=4)
