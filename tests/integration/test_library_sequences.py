"""What libraries split sequences with is verified before the training, without being named."""

import importlib.util
from pathlib import Path

import pytest

from tests.integration.launch import run_checked, run_plain

SCRIPT = Path(__file__).with_name("programs") / "split_by_libraries.py"
FAMILY = ["SEQ001", "SEQ002", "SEQ003", "SEQ004", "SEQ009"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def needing(name, *values):
    is_missing = importlib.util.find_spec(name) is None
    skip = pytest.mark.skipif(is_missing, reason=f"needs {name}")
    return pytest.param(name, *values, marks=skip)


def run(*args):
    options = ["--fail-on", "never", "--verify-sequence"]
    outcome = run_checked(SCRIPT, ["--way", *args], options=options)
    assert outcome.exit_status == 0, outcome.describe()
    return outcome


def losses(outcome):
    return sorted(line for line in outcome.stdout.splitlines() if line.startswith("losses "))


def found(outcome):
    return [f for f in outcome.report["findings"] if f["code"] in FAMILY]


@pytest.mark.parametrize("way", [needing(n) for n in ("deepspeed", "veomni", "yunchang")])
def test_what_is_used_rightly_passes_and_the_run_stays_the_same(way):
    checked = run(way)
    assert losses(checked) == losses(run_plain(SCRIPT, ["--way", way]))
    assert len(losses(checked)) == 2, checked.describe()
    assert checked.alarms == found(checked) == [], checked.describe()
    assert set(FAMILY) <= set(checked.report["checked"])


@pytest.mark.parametrize("way", [needing("deepspeed"), needing("yunchang")])
def test_swapped_indices_are_a_note_for_heads_may_come_first(way):
    outcome = run(way, "--fault", "swapped")
    assert outcome.alarms == [], outcome.describe()
    notes = [f["message"] for f in found(outcome) if f["code"] == "SEQ004"]
    assert [message.partition(" does ")[2].partition(";")[0] for message in notes] == [
        "not attend to 4-15",
        "not attend to 0-7,12-15",
    ], outcome.describe()
    assert all("heads before tokens" in message for message in notes)


@pytest.mark.parametrize(
    ("way", "fault", "words"),
    [
        needing("veomni", "dim", "joins dim 0 instead of dim 1"),
        needing("yunchang", "zigzag", "tokens 4-15 came in head-tail order, which is not undone"),
    ],
)
def test_wrong_uses_in_functions_that_are_marked_are_found(way, fault, words):
    outcome = run(way, "--fault", fault)
    (finding,) = outcome.alarms
    assert (finding["code"], finding["ranks"]) == ("SEQ002", [0, 1]), outcome.describe()
    assert words in finding["message"]
