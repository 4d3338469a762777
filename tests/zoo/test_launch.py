"""Tests for running scripts within bounds, on real processes."""

from pathlib import Path

import psutil
import pytest

from tests.zoo.launch import Run, run_script

TRACEBACK = "[rank0]: Traceback (most recent call last):\n"
EXIT_ABORT = "terminate called without an active exception\n"


def ended(log: str) -> Run:
    return Run(outcome="finished", status=1, duration_s=1.0, log=log)


@pytest.mark.timeout(180)
def test_a_script_that_never_ends_is_hung_and_leaves_no_process(tmp_path: Path):
    script = tmp_path / "sleeper.py"
    script.write_text("import time\ntime.sleep(600)\n")
    run = run_script(script, "plain", timeout_s=15.0)
    assert (run.outcome, run.status) == ("hung", None)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script) in _words(p)]


@pytest.mark.timeout(180)
def test_a_script_that_raises_has_failed_with_its_traceback_in_the_log(tmp_path: Path):
    script = tmp_path / "raiser.py"
    script.write_text("raise RuntimeError('out of data')\n")
    run = run_script(script, "plain", timeout_s=120.0)
    assert (run.outcome, run.status) == ("failed", 1)
    assert "out of data" in run.log


@pytest.mark.timeout(180)
def test_a_process_that_outlives_its_script_is_named_and_killed(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '613'], start_new_session=True)\n"
        # The tree is polled; a parent that leaves at once would hide its child.
        "time.sleep(3)\n"
    )
    run = run_script(script, "plain", timeout_s=120.0)
    assert run.outcome == "finished"
    assert run.left_behind == ("sleep 613", "sleep 613")
    assert not [p for p in psutil.process_iter(["cmdline"]) if "613" in _words(p)]


@pytest.mark.parametrize(
    ("log", "aborted"),
    [(EXIT_ABORT, True), (EXIT_ABORT + TRACEBACK, False), ("all is well\n", False)],
)
def test_an_abort_at_exit_is_told_from_a_failure_of_the_script(log, aborted):
    assert ended(log).aborted_at_exit is aborted


def test_the_mismatch_that_torch_names_is_recognised():
    assert ended("RuntimeError: Detected mismatch between collectives on ranks.").names_mismatch
    assert not ended("RuntimeError: Connection closed by peer").names_mismatch


def _words(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []
