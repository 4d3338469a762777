"""Ranks, monitors and disks that fail: the report exists and says enough."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.integration.launch import REPOSITORY, Launch

FAULTY = Path(__file__).with_name("faulty.py")

pytestmark = pytest.mark.timeout(300)


def line_of(function):
    """Return the line of the first statement of a function of the program."""
    lines = FAULTY.read_text().splitlines()
    return lines.index(f"def {function}():") + 2


def loud(report):
    return {f["code"]: f for f in report["findings"] if f["severity"] != "info"}


def ranks_of(report):
    return {info["rank"]: info for info in report["run"]["ranks"]}


def wait_for_report(folder, timeout_s=20.0):
    """Return the report of a run whose launcher has ended; its monitor may need a moment more."""
    deadline = time.monotonic() + timeout_s
    while True:
        report = msgspec.json.decode((folder / "report.json").read_bytes())
        if report["complete"] or time.monotonic() > deadline:
            return report
        time.sleep(0.1)


def run_faulty(folder, *args, options=(), launcher="forked"):
    """Run the program; return how it ended and its report once the monitor is done."""
    options = ["--run-dir", str(folder), *options]
    outcome = Launch(launcher=launcher).checked(FAULTY, args, options=options)
    assert outcome.leftovers == (), outcome.describe()
    return outcome, wait_for_report(folder)


@pytest.mark.parametrize(
    ("fault", "rank", "launcher"),
    [
        ("kill", 0, "torchrun"),
        ("kill", 1, "forked"),
        ("abort", 1, "forked"),
        pytest.param("abort", 0, "torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_named_and_what_all_did_last_is_said(tmp_path, fault, rank, launcher):
    outcome, report = run_faulty(tmp_path / "run", fault, str(rank), launcher=launcher)
    assert outcome.exit_status == 1
    assert report["complete"], outcome.describe()
    assert report["run"]["outcome"] == "killed", outcome.describe()
    assert set(loud(report)) == {"HNG002"}, outcome.describe()
    assert loud(report)["HNG002"]["ranks"] == [rank]
    infos = ranks_of(report)
    assert infos[rank]["fate"] == "died"
    assert "all_reduce #" in infos[rank]["last"]
    assert infos[1 - rank]["fate"] in ("died", "raised")
    assert infos[1 - rank]["last"]


def test_a_rank_that_raises_is_the_cause_and_its_peer_is_shown_waiting(tmp_path):
    outcome, report = run_faulty(tmp_path / "run", "raise_error", "1", launcher="torchrun")
    assert outcome.exit_status == 1
    assert report["run"]["outcome"] == "failed", outcome.describe()
    assert set(loud(report)) == {"HNG001"}, outcome.describe()
    finding = loud(report)["HNG001"]
    assert finding["ranks"] == [1]
    assert finding["location"]["line"] == line_of("raise_error")
    assert "a batch without samples" in ranks_of(report)[1]["last"]


def test_killing_the_monitor_disturbs_neither_the_training_nor_the_report(tmp_path):
    folder = tmp_path / "run"
    outcome, report = run_faulty(folder, "kill_the_monitor", "0", str(folder))
    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.stdout.count("gradient") == 2
    assert report["complete"], outcome.describe()
    assert report["run"]["outcome"] == "finished"
    assert [f["code"] for f in report["findings"]] == ["DIA001"], outcome.describe()
    assert all("all_reduce #" in info["last"] for info in report["run"]["ranks"])


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("stay_away", 1),
        ("hold_the_gil", 1),
        pytest.param("hold_the_gil", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_never_comes_is_found_where_it_is_and_the_job_is_ended(tmp_path, fault, rank):
    outcome, report = run_faulty(
        tmp_path / "run", fault, str(rank), options=["--hang-timeout", "3", "--on-hang", "abort"]
    )
    assert outcome.exit_status == 1
    assert report["complete"], outcome.describe()
    assert report["run"]["outcome"] == "aborted", outcome.describe()
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    assert [f["ranks"] for f in errors] == [[rank]], outcome.describe()
    places = [errors[0]["location"], *(entry["location"] for entry in errors[0]["evidence"])]
    lines = {place["line"] for place in places if place and place["file"] == str(FAULTY)}
    assert lines & set(range(line_of(fault), line_of(fault) + 2)), outcome.describe()
    assert "all_reduce #" in ranks_of(report)[1 - rank]["last"]


def test_a_pipe_behind_the_launcher_ends_when_the_job_is_aborted(tmp_path):
    command = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
        f" -m distdiag.check --run-dir {tmp_path / 'run'} --hang-timeout 3 --on-hang abort"
        f" {FAULTY} stay_away 1 2>&1 | tee {tmp_path / 'log'}"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, shell=True, env=environment, timeout=120, check=True, stdout=subprocess.DEVNULL
    )
    log = " ".join((tmp_path / "log").read_text().split())  # the terminal wraps lines
    assert "the run was aborted" in log
    assert wait_for_report(tmp_path / "run", 0)["complete"]


@contextmanager
def small_disk(folder):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_runs_full_harms_neither_the_training_nor_the_report(tmp_path):
    folder = tmp_path / "run"
    with small_disk(folder):
        outcome, report = run_faulty(folder, "fill_the_disk", "1", str(folder))
    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.stdout.count("gradient") == 2
    assert report["complete"], outcome.describe()
    assert report["run"]["outcome"] == "finished"
    assert loud(report) == {}, outcome.describe()
    assert all("all_reduce #" in info["last"] for info in report["run"]["ranks"])


@pytest.mark.slow  # it waits for the threshold of a rank that computes
def test_a_rank_that_computes_for_long_is_named_and_nobody_is_accused(tmp_path):
    options = ("--hang-timeout", "2", "--on-hang", "abort")
    outcome, report = run_faulty(tmp_path / "run", "compute_for_long", "1", options=options)
    assert outcome.exit_status == 0, outcome.describe()
    assert loud(report) == {}, outcome.describe()
    notes = [f for f in report["findings"] if f["code"] == "HNG015"]
    assert [f["ranks"] for f in notes] == [[1]], outcome.describe()
    start = line_of("compute_for_long")
    assert start <= notes[0]["location"]["line"] <= start + 2, outcome.describe()
