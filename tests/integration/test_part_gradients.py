"""Gradients that programs sum by hand, or forget to, under a real launcher."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("part_gradients.py")

pytestmark = pytest.mark.timeout(300)


def findings(way):
    outcome = run_checked(SCRIPT, [way])
    assert outcome.report is not None, outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    found = {finding["code"]: finding for finding in outcome.report["findings"]}
    assert "DIA003" not in found, outcome.describe()
    assert "SEQ012" in outcome.report["checked"], outcome.describe()
    return {code: each for code, each in found.items() if each["severity"] != "info"}


def test_parameters_between_gathered_parts_that_nobody_sums_are_reported():
    found = findings("parts-forgotten")
    assert set(found) == {"SEQ012"}
    assert found["SEQ012"]["severity"] == "error"
    assert "layers.1.norm.weight" in found["SEQ012"]["subjects"]
    assert len(found["SEQ012"]["subjects"]) == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("norm", ["layers.1.norm.weight"]),
        ("router", [f"layers.{number}.router.weight" for number in range(3)]),
    ],
)
def test_what_a_loop_leaves_out_is_reported(way, names):
    found = findings(way)
    assert set(found) == {"SEQ012"}
    assert found["SEQ012"]["severity"] == "warning"
    assert found["SEQ012"]["subjects"] == names


@pytest.mark.slow
@pytest.mark.parametrize("way", ["right", "parts", "personal", "blocks", "lazy"])
def test_what_is_summed_or_meant_to_be_each_ranks_own_is_not(way):
    assert findings(way) == {}
