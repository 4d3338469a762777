"""Sequences that ranks share rightly or wrongly, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("sequence_faults.py")

pytestmark = pytest.mark.timeout(300)


def findings(*args):
    outcome = run_checked(SCRIPT, list(args))
    found = outcome.reported()
    unseen = "no exchange between ranks was seen around attention"
    is_seen = not any(why.startswith(unseen) for why in outcome.report["not_checked"].values())
    return found, is_seen


def test_a_sequence_that_nobody_splits_is_reported():
    found, _ = findings("heads", "whole")
    assert set(found) == {"SEQ005"}
    assert found["SEQ005"]["ranks"] == [0, 1]
    assert "share sequences by all-to-all" in found["SEQ005"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "fault", "code"),
    [
        ("ring", "whole", "SEQ005"),
        ("keys", "whole", "SEQ005"),
        ("heads", "mixed", "SEQ006"),
        ("heads", "shifted", "SEQ007"),
        ("heads", "given", "SEQ007"),
        ("heads", "unreduced", "SEQ008"),
        ("heads", "unpaired", "SEQ010"),
        ("softmax", "unpaired", "SEQ010"),
        ("wrapped", "unpaired", "SEQ010"),
        ("ring", "placed", "SEQ011"),
        ("functional", "whole", "SEQ005"),
        ("functional", "mixed", "SEQ006"),
        ("functional", "shifted", "SEQ007"),
        ("functional", "unreduced", "SEQ008"),
        ("functional", "unpaired", "SEQ010"),
        ("permuted", "placed", "SEQ011"),
        ("tensors", "whole", "SEQ005"),
    ],
)
def test_each_fault_is_reported_by_its_check_alone(way, fault, code):
    found, _ = findings(way, fault)
    assert set(found) == {code}


@pytest.mark.parametrize(
    "way",
    [
        "heads",
        pytest.param("softmax", marks=pytest.mark.slow),
        pytest.param("wrapped", marks=pytest.mark.slow),
        pytest.param("ring", marks=pytest.mark.slow),
        pytest.param("keys", marks=pytest.mark.slow),
        pytest.param("gathered", marks=pytest.mark.slow),
        pytest.param("functional", marks=pytest.mark.slow),
        pytest.param("permuted", marks=pytest.mark.slow),
        pytest.param("tensors", marks=pytest.mark.slow),
    ],
)
def test_sequences_that_are_shared_rightly_are_seen_and_not_accused(way):
    assert findings(way) == ({}, True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compiled", "enclosed", "experts", "projections"])
def test_what_is_not_seen_or_something_else_is_not_accused(way):
    assert findings(way) == ({}, False)
