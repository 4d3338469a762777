"""Experts that are kept wrongly, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("routing_faults.py")

pytestmark = pytest.mark.timeout(300)


def findings(fault):
    return observed(fault)[0]


def observed(fault, *options):
    outcome = run_checked(SCRIPT, [fault], options=options)
    assert outcome.report is not None, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    found = {finding["code"]: finding for finding in outcome.report["findings"]}
    assert "DIA003" not in found, outcome.describe()
    return found, outcome.report["not_checked"]


def test_experts_that_both_ranks_start_with_are_reported():
    found = findings("twice")
    assert found["MOE005"]["severity"] == "warning"
    assert found["MOE005"]["ranks"] == [0, 1]
    assert "the router knows 4 experts and each rank holds 2" in found["MOE005"]["message"]


def test_experts_that_are_parts_are_not():
    assert all(finding["severity"] == "info" for finding in findings("parts").values())


def test_routers_that_differ_are_reported_by_what_they_choose():
    found = findings("unequal")
    assert found["MOE002"]["severity"] == "warning"
    assert "by different scores" in found["MOE002"]["message"]


@pytest.mark.slow
def test_the_light_profile_looks_at_routing_and_leaves_auxiliary_losses_out():
    found, not_checked = observed("unequal", "--profile", "light")
    assert found["MOE002"]["severity"] == "warning"
    assert "MOE002" not in not_checked
    assert not_checked["MOE010"] == "the light profile leaves the steps out"


@pytest.mark.slow
def test_biases_that_follow_the_counts_of_one_rank_are_reported():
    found = findings("biased")
    assert found["MOE013"]["severity"] == "warning"
    assert found["MOE013"]["subjects"] == ["expert_bias"]


@pytest.mark.slow
def test_biases_that_follow_the_counts_of_all_ranks_are_not():
    assert all(finding["severity"] == "info" for finding in findings("balanced").values())


@pytest.mark.slow
def test_biases_are_reported_by_routers_whose_gradients_are_summed_all_at_once():
    found = findings("biased_by_hand")
    assert found["MOE013"]["severity"] == "warning"
    assert found["MOE013"]["subjects"] == ["expert_bias"]


@pytest.mark.slow
def test_a_router_that_is_marked_as_a_part_of_experts_is_reported():
    found = findings("mismarked")
    assert found["REP003"]["severity"] == "warning"
    assert found["REP003"]["subjects"] == ["layer.gate.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["balanced_by_hand", "marked"])
def test_equal_biases_and_marks_of_experts_alone_are_not(program):
    assert all(finding["severity"] == "info" for finding in findings(program).values())
