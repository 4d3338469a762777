"""Random numbers that samples are changed by, in many styles: drawn in workers and by ranks."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("augmenting.py")

pytestmark = pytest.mark.timeout(300)


def test_generators_that_workers_or_ranks_share_are_named():
    outcome = run_checked(SCRIPT, ["wrong"])
    found = {each["subjects"][0]: each for each in outcome.alarms}
    assert {each["code"] for each in outcome.alarms} == {"DAT013"}, outcome.describe()
    expected = {
        "CopiedGenerator": "workers 0 and 1 of",
        "CopiedTransform": "from the generator Jitter.generator",
        "SeededByConstant": "workers 0 and 1 of",
        "SeededByNumber": "worker 0 of ranks 0-1 draws the same numbers from Python's generator",
    }
    assert found.keys() == expected.keys()
    assert all(expected[name] in found[name]["message"] for name in expected), outcome.describe()
    lines = SCRIPT.read_text().splitlines()
    assert "seed(number)" in lines[found["SeededByNumber"]["location"]["line"] - 1]


@pytest.mark.parametrize(
    ("which", "noted"),
    [("right", {"SeededAlike"}), ("meant", {"OneScale", "OneSize", "Mixed", "OneOrder"})],
)
def test_numbers_of_their_own_and_those_of_whole_batches_are_no_alarm(which, noted):
    outcome = run_checked(SCRIPT, [which])
    assert outcome.alarms == [], outcome.describe()
    notes = [each for each in outcome.report["findings"] if each["code"] == "DAT013"]
    assert {each["subjects"][0] for each in notes} == noted, outcome.describe()
    assert "DAT013" in outcome.report["checked"]
