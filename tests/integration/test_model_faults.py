"""Models that are kept wrongly, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("model_faults.py")

pytestmark = pytest.mark.timeout(300)


def findings(fault, *options):
    outcome = run_checked(SCRIPT, [fault], options=options)
    assert outcome.report is not None, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    found = {finding["code"]: finding for finding in outcome.report["findings"]}
    assert "DIA003" not in found, outcome.describe()
    return found, outcome.report


def test_a_model_that_is_trained_past_ddp_is_reported_at_its_first_step():
    found, report = findings("bypassed")
    assert found["SHD019"]["severity"] == "error"
    assert found["SHD019"]["step"] == 0
    assert "SHD004" not in found
    assert {"SHD002", "SHD004", "SHD020"} <= set(report["checked"])


def test_the_light_profile_says_that_it_did_not_look_at_steps():
    found, report = findings("bypassed", "--profile", "light")
    assert "SHD019" not in found
    assert report["not_checked"]["SHD019"] == "the light profile leaves the steps out"
    assert "SHD002" in report["checked"]


def test_what_fully_shard_was_not_called_on_is_noted_and_its_gradients_are_reported():
    found, _ = findings("left_out")
    assert found["SHD018"]["severity"] == "info"
    assert found["SHD018"]["subjects"][0] == "head.weight"
    assert found["SHD004"]["severity"] == "error"


def test_units_that_ranks_reshard_differently_are_reported():
    found, _ = findings("resharding", "--on-hang", "abort", "--hang-timeout", "20")
    assert "reshard_after_forward True on rank 0, False on rank 1" in found["SHD002"]["message"]


def test_a_tower_that_one_rank_trains_and_the_other_does_not_is_reported():
    found, _ = findings("one_sided")
    assert found["SHD020"]["severity"] == "warning"
    assert found["SHD020"]["ranks"] == [1]
    assert found["SHD020"]["subjects"] == ["extra.weight", "extra.bias"]
