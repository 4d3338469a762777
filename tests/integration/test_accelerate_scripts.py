"""Scripts that accelerate ships for testing itself run under distdiag without an alarm."""

import importlib.util
from pathlib import Path

import pytest

from tests.integration.launch import run_checked


def accelerate_script(name: str) -> Path:
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("accelerate is not installed")
    return Path(spec.submodule_search_locations[0], "test_utils", "scripts", name)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("test_script.py", marks=pytest.mark.slow),
        pytest.param("test_sync.py", marks=pytest.mark.slow),
        "test_ops.py",
    ],
)
def test_accelerate_script_finishes_without_an_alarm(name: str) -> None:
    outcome = run_checked(accelerate_script(name), timeout=280)
    assert outcome.exit_status == 0 or outcome.aborted_at_exit, outcome.describe()
    assert outcome.alarms == [], outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    assert outcome.report is not None, outcome.describe()
    assert outcome.report["complete"] is True, outcome.describe()
    assert outcome.report["run"]["outcome"] == "finished", outcome.describe()
