"""The status that torchrun hides, and real launches of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from distdiag.cli.torchrun import real_status
from distdiag.config import Config
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Outcome, Report, Run, Severity
from distdiag.reports import read_report, write_report

ROOT = Path(__file__).parents[2]


def make_report(outcome=Outcome.FINISHED, *severities):
    run = Run(
        id="r",
        command=("train.py",),
        world_size=2,
        ranks=(),
        torch="",
        started="",
        ended="",
        outcome=outcome,
    )
    findings = tuple(
        Finding(
            code="COL001",
            name="missing-from-collective",
            severity=severity,
            grade=Grade.PROVEN,
            confidence=1.0,
            message="m",
            ranks=RankSet({1}),
            evidence=(),
        )
        for severity in severities
    )
    return Report(complete=True, run=run, findings=findings)


CLEAN = make_report()
FAILED = make_report(Outcome.FAILED)
FOUND = make_report(Outcome.FINISHED, Severity.ERROR)
WARNED = make_report(Outcome.FINISHED, Severity.WARNING)


@pytest.mark.parametrize(
    ("launcher", "statuses", "report", "fail_on", "expected"),
    [
        (0, {"0": 0, "1": 0}, CLEAN, "error", 0),
        (1, {"0": 0, "1": 3}, FAILED, "error", 3),
        (1, {"1": 3, "0": 1}, FAILED, "error", 3),
        (1, {"1": -15, "0": 5}, FAILED, "error", 5),
        (1, {"1": -9, "0": -15}, FAILED, "error", 137),
        (1, {"0": 0, "1": 0}, FOUND, "error", 1),
        (1, {"0": 0, "1": 0}, WARNED, "warning", 1),
        (1, {"0": 0, "1": 0}, WARNED, "error", 0),
        (1, {"0": 0, "1": 0}, FOUND, "never", 0),
        (1, {"0": 0, "1": 0}, CLEAN, "error", 0),
        (1, {"0": 0}, FAILED, "error", 1),
        (1, {}, CLEAN, "error", 1),
        (1, None, CLEAN, "error", 1),
        (1, None, None, "error", 1),
        (130, {"0": 0}, CLEAN, "error", 130),
    ],
)
def test_the_script_counts_before_the_findings(
    tmp_path, launcher, statuses, report, fail_on, expected
):
    if report is not None:
        (tmp_path / "run.json").touch()
        write_report(tmp_path / "report.json", report)
    if statuses is not None:
        (tmp_path / "attempt-0").mkdir()
        (tmp_path / "attempt-0" / "exit-status.json").write_text(json.dumps(statuses))
    assert real_status(launcher, tmp_path, Config(fail_on=fail_on)) == expected


def test_the_last_attempt_decides(tmp_path):
    (tmp_path / "run.json").touch()
    write_report(tmp_path / "report.json", FAILED)
    for attempt, status in ((9, 4), (10, 5)):
        folder = tmp_path / f"attempt-{attempt}"
        folder.mkdir()
        (folder / "exit-status.json").write_text(json.dumps({"0": status}))
    assert real_status(1, tmp_path, Config()) == 5


def start(tmp_path, text, *arguments):
    """Start ``distdiag check`` on a script of this text, on two ranks."""
    script = tmp_path / "script.py"
    script.write_text(text)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [*(sys.executable, "-m", "distdiag.cli", "check", "--run-dir", "run"), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_status_of_the_script_comes_through(tmp_path):
    # The launcher ends rank 0 as soon as rank 1 has failed, even before its script has begun.
    text = """
import os, pathlib, sys, time
begun = pathlib.Path("begun")
if os.environ["RANK"] == "0":
    begun.touch()
while not begun.exists():
    time.sleep(0.01)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""
    process = start(tmp_path, text, "script.py")
    process.communicate(timeout=100)
    assert process.returncode == 3
    assert read_report(tmp_path / "run").run.outcome is Outcome.FAILED


def test_the_script_gets_its_arguments_and_the_check_gets_its_own(tmp_path):
    text = "import sys\nprint(sys.argv, flush=True)\n"
    given = ["--help", "--select", "x", "--", "-1", ""]
    process = start(tmp_path, text, "--fail-on", "never", "script.py", *given)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert output.count(str(["script.py", *given])) == 2


def test_the_end_of_the_command_is_the_end_of_its_ranks(tmp_path):
    text = "import os, time, pathlib\npathlib.Path('up' + os.environ['RANK']).touch()\n"
    process = start(tmp_path, text + "time.sleep(600)\n", "script.py")
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"up{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
