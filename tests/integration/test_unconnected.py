"""Ranks that were launched together and that nothing connects, under a real launcher."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("unconnected.py")

pytestmark = pytest.mark.timeout(300)


ACCELERATE = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None or torch.cuda.is_available(),
    reason="needs accelerate, and no GPU that it would choose",
)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        pytest.param(
            "accelerate", "accelerate has set itself up for one process", marks=ACCELERATE
        ),
        pytest.param("plain", "no process group exists", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_that_train_alone_are_reported_once(way, words):
    outcome = run_checked(SCRIPT, [way])
    found = outcome.reported()
    assert found.keys() == {"ENV001"}, outcome.describe()
    assert found["ENV001"]["severity"] == "warning"
    assert found["ENV001"]["ranks"] == [0, 1]
    assert f"all 2 ranks train alone: WORLD_SIZE is 2 and {words}" in found["ENV001"]["message"]
    assert found["ENV001"]["location"]["source"] == "optimizer.step()"
    assert outcome.exit_status == 0 or outcome.aborted_at_exit, outcome.describe()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["later", "one"])
def test_ranks_that_meet_later_or_leave_the_steps_to_one_are_not_accused(way):
    outcome = run_checked(SCRIPT, [way])
    assert "ENV001" not in outcome.reported(), outcome.describe()
