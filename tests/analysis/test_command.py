"""``distdiag analyze`` as a person meets it: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.findings.finding import Outcome
from distdiag.findings.report_json import decode_report
from tests.dumps.recorders import recorders, write_dumps

ROOT = Path(__file__).parents[2]


@pytest.fixture
def analyze(tmp_path):
    def run(*arguments):
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.run(
            [sys.executable, "-m", "distdiag.cli", "analyze", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            encoding="utf-8",
            timeout=100,
        )

    return run


def stuck_job(folder):
    ranks = recorders(3)
    for recorder in ranks:
        recorder.call(line=10)
    for recorder in ranks[:2]:
        recorder.call(line=20)
        recorder.pending()
    return write_dumps(folder, ranks)


def healthy_job(folder):
    ranks = recorders(2)
    for recorder in ranks:
        recorder.call()
    return write_dumps(folder, ranks)


def test_a_finding_ends_with_status_1_and_the_culprit(analyze, tmp_path):
    done = analyze(stuck_job(tmp_path / "dumps"))
    assert done.returncode == 1
    assert "ERROR COL001" in done.stdout
    assert "rank 2 never called all_reduce #2" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_no_finding_ends_with_status_0(analyze, tmp_path):
    done = analyze(healthy_job(tmp_path / "dumps"))
    assert (done.returncode, done.stderr) == (0, "")


def test_json_is_a_report(analyze, tmp_path):
    done = analyze(stuck_job(tmp_path / "dumps"), "--report", "json")
    report = decode_report(done.stdout.encode())
    assert report.run.outcome is Outcome.HUNG
    assert [str(finding.ranks) for finding in report.findings] == ["2"]


def test_files_that_cannot_be_used_are_one_line_each(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    (folder / "nccl_trace_rank_9").write_bytes((folder / "nccl_trace_rank_0").read_bytes()[:-50])
    done = analyze(folder, "--report", "json")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"distdiag: {folder}/nccl_trace_rank_9: the flight-recorder dump cannot")
    assert f"{folder}/nccl_trace_rank_9" in decode_report(done.stdout.encode()).not_checked


def test_checks_can_be_selected(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    done = analyze(folder, "--select", "COL003,COL002", "--report", "json")
    assert done.returncode == 0
    report = decode_report(done.stdout.encode())
    assert report.checked == ("COL002", "COL003")
    assert report.not_checked["COL001"] == "left out by --select or --ignore"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "Missing argument 'PATH...'"),
        (("gone",), "gone does not exist"),
        (("empty",), "nothing that can be checked was found"),
        (("empty", "--report", "xml"), 'unknown report "xml"'),
        (("empty", "--select", "XYZ"), 'unknown code or prefix "XYZ"'),
        (("empty", "--rank", "a"), "'a' is not FILE=RANK"),
        (("empty", "--rank", "a=b"), "'a=b' is not FILE=RANK"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(analyze, tmp_path, arguments, problem):
    (tmp_path / "empty").mkdir()
    done = analyze(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_rank_of_a_file_can_be_told(analyze, tmp_path):
    folder = stuck_job(tmp_path / "dumps")
    for rank, name in enumerate(["red", "green", "blue"]):
        (folder / f"nccl_trace_rank_{rank}").rename(folder / name)
    asked = analyze(folder)
    assert asked.returncode == 2
    assert "say --rank FILE=RANK" in asked.stderr
    told = analyze(folder, "--rank", "red=0", "--rank", "green=1", "--rank", "dumps/blue=2")
    assert told.returncode == 1
    assert "rank 2 never called" in " ".join(told.stdout.split())
