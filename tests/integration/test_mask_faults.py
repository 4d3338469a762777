"""Masks of texts whose parts several ranks hold, right or wrong, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("mask_faults.py")

pytestmark = pytest.mark.timeout(300)


def findings(*args):
    return run_checked(SCRIPT, list(args)).reported()


def test_a_mask_of_which_all_ranks_take_the_first_part_is_reported():
    found = findings("ring", "begin")
    assert set(found) == {"SEQ013"}
    assert found["SEQ013"]["ranks"] == [0, 1]
    assert "does not belong to the token ids" in found["SEQ013"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("ring", "end"),
        ("ring", "reversed"),
        ("heads", "begin"),
        ("heads", "repeated"),
        ("scores", "repeated"),
        ("keys", "repeated"),
        ("gathered", "first"),
        ("gathered", "rows"),
    ],
)
def test_each_wrong_mask_is_reported_by_its_check_alone(way, fault):
    assert set(findings(way, fault)) == {"SEQ013"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("ring",),
        ("ring", "ones"),
        ("ring", "striped"),
        ("heads",),
        ("heads", "causal"),
        ("scores",),
        ("scores", "causal"),
        ("keys",),
        ("keys", "striped"),
        ("gathered",),
        ("local",),
    ],
)
def test_masks_of_their_own_tokens_are_not_accused(args):
    assert findings(*args) == {}
