"""Real ranks that stand still: which hang, when that is reported, and when it is taken back."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

PROGRAM = Path(__file__).with_name("standing.py")
ABORT = ["--on-hang", "abort"]

pytestmark = pytest.mark.timeout(200)


def test_a_rank_whose_child_computes_is_not_killed():
    run = run_checked(PROGRAM, ["children", "9"], options=["--hang-timeout", "3", *ABORT])
    assert run.exit_status == 0, run.describe()
    assert run.stdout.count("done") == 2
    assert run.reported() == {}, run.describe()
    assert run.report["run"]["outcome"] == "finished"


def test_a_lock_that_nobody_holds_is_reported_before_the_first_collective():
    run = run_checked(PROGRAM, ["lock"], options=["--hang-timeout", "3", *ABORT])
    assert run.exit_status == 1, run.describe()
    found = run.reported()
    assert set(found) == {"HNG008"}, run.describe()
    assert found["HNG008"]["ranks"] == [0, 1]
    assert run.report["run"]["outcome"] == "aborted"


def test_calls_that_cannot_end_end_the_job_at_once_without_a_threshold():
    # With this threshold nothing else ends the job while the test may run.
    run = run_checked(PROGRAM, ["contradiction"], options=["--hang-timeout", "3600", *ABORT])
    assert run.exit_status == 1, run.describe()
    assert set(run.reported()) == {"COL002"}, run.describe()
    assert run.report["run"]["outcome"] == "aborted"


def test_a_run_that_finishes_after_it_stood_still_had_no_hang():
    run = run_checked(PROGRAM, ["late", "7"], options=["--hang-timeout", "3"])
    assert run.exit_status == 0, run.describe()
    assert run.reported() == {}, run.describe()
    assert run.report["run"]["outcome"] == "finished"
    (note,) = [each for each in run.report["findings"] if each["code"] == "COL001"]
    assert note["severity"] == "info"
    assert "distdiag: error COL001" in run.stderr
    assert "distdiag: info COL001" in run.stderr  # what was said is taken back where it was said
