"""With ``--strict`` a contradiction is a Python error at the user's line, before the backend."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("strict.py")

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("op", "COL002"),
        ("shape", "COL003"),
        pytest.param("dtype", "COL004", marks=pytest.mark.slow),
        pytest.param("reduce_op", "COL005", marks=pytest.mark.slow),
        pytest.param("root", "COL006", marks=pytest.mark.slow),
    ],
)
def test_a_contradiction_raises_and_is_reported(kind, code):
    run = run_checked(SCRIPT, [kind], options=["--strict"])
    assert run.exit_status == 1, run.describe()
    assert "CollectiveMismatchError" in run.stderr, run.describe()
    assert "strict.py" in run.stderr, run.describe()
    assert "went on" not in run.stdout, run.describe()
    assert [f["code"] for f in run.alarms] == [code], run.describe()
    assert run.report["run"]["active_modes"] == ["strict"], run.describe()
    assert not run.leftovers, run.describe()


def test_calls_that_agree_are_let_through():
    run = run_checked(SCRIPT, ["none"], options=["--strict"])
    assert run.exit_status == 0 or run.aborted_at_exit, run.describe()
    assert run.stdout.count("went on") == 2, run.describe()
    assert not run.alarms, run.describe()
