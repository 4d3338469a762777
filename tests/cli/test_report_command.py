"""``distdiag report`` and ``distdiag baseline`` as CI uses them: in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distdiag.findings.finding import Outcome
from distdiag.reports import read_report, write_report
from distdiag.reports.gate import Gate
from tests import forked
from tests.reports.samples import make_finding, make_note, make_report, make_run, make_warning
from tests.reports.sarif_model import read_log

ROOT = Path(__file__).parents[2]


@pytest.fixture
def distdiag(tmp_path):
    """Return a function that runs the command in an empty directory."""

    def run(*arguments, **environ):
        if not environ:  # variables may say what Python reads when it starts
            return forked.run(["-m", "distdiag.cli", *arguments], timeout=100, cwd=tmp_path)
        return subprocess.run(
            [sys.executable, "-m", "distdiag.cli", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
            capture_output=True,
            encoding="utf-8",
            timeout=100,
        )

    return run


def runs_of(tmp_path, **reports):
    """Write the reports of runs of these names, the last one as the newest."""
    for number, (name, report) in enumerate(reports.items()):
        folder = tmp_path / "distdiag-runs" / name
        folder.mkdir(parents=True)
        write_report(folder / "report.json", report)
        os.utime(folder / "report.json", (1_000_000 + number,) * 2)
    return tmp_path / "distdiag-runs"


def test_without_a_path_the_newest_run_is_shown_and_its_status_returned(distdiag, tmp_path):
    runs_of(tmp_path, a=make_report(make_finding()), b=make_report())
    done = distdiag("report")
    assert done.returncode == 0
    assert "nothing found" in done.stdout
    assert distdiag("report", "distdiag-runs/a").returncode == 1


@pytest.mark.parametrize(
    ("report", "options", "status"),
    [
        (make_report(make_finding()), (), 1),
        (make_report(make_warning()), (), 0),
        (make_report(make_warning()), ("--fail-on", "warning"), 1),
        (make_report(make_finding()), ("--fail-on", "never"), 0),
        (make_report(make_warning(), gate=Gate("warning")), (), 1),
        (make_report(run=make_run(Outcome.FAILED, exit_status=3)), (), 3),
        (make_report(run=make_run(Outcome.FAILED, exit_status=3)), ("--fail-on", "never"), 3),
    ],
)
def test_the_status_is_that_of_the_run_unless_the_options_say_more(
    distdiag, tmp_path, report, options, status
):
    write_report(tmp_path / "report.json", report)
    assert distdiag("report", "report.json", *options).returncode == status


def test_the_last_line_tells_how_warnings_would_fail(distdiag, tmp_path):
    write_report(tmp_path / "report.json", make_report(make_warning()))
    last = distdiag("report", ".").stderr.splitlines()[-1]
    assert last == "distdiag: exit status 0 in spite of 1 warning; --fail-on warning makes it 1."


def test_a_folder_of_runs_gives_a_line_for_each_and_the_worst_status(distdiag, tmp_path):
    runs_of(tmp_path, a=make_report(make_finding()), b=make_report(make_note()), c=make_report())
    done = distdiag("report", "distdiag-runs")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "distdiag-runs/a: 1 error; the run finished",
        "  error COL003 collective-shape-mismatch train.py:41 ranks 1: all_gather #12 has shape "
        "[4, 8] on rank 0 and [3, 8] on rank 1",
        "distdiag-runs/b: 1 note; the run finished",
        "distdiag-runs/c: nothing found; the run finished",
    ]
    refused = distdiag("report", "distdiag-runs", "--format", "sarif")
    assert (refused.returncode, refused.stderr) == (
        2,
        "distdiag: distdiag-runs holds 3 runs: name one of them to get another format\n",
    )


def test_one_form_goes_to_stdout_or_a_file_and_several_to_the_run_directory(distdiag, tmp_path):
    run = runs_of(tmp_path, a=make_report(make_finding())) / "a"
    assert read_log(distdiag("report", "--format", "sarif").stdout).runs[0].results
    done = distdiag("report", "--format", "junit", "-o", "out.xml")
    assert (done.returncode, done.stdout) == (1, "")
    assert ElementTree.parse(tmp_path / "out.xml").getroot().tag == "testsuites"
    several = distdiag("report", "--format", "terminal,junit", "--format", "markdown,github")
    assert several.returncode == 1
    assert several.stdout.splitlines()[-1].startswith("::error file=train.py,line=41,")
    assert {path.name for path in run.iterdir()} == {
        "report.json",
        "report.junit.xml",
        "report.md",
    }
    assert "distdiag: junit report: distdiag-runs/a/report.junit.xml" in several.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--format", "pdf"), 'unknown report "pdf" (there are: '),
        (("--format", "terminal,pdf"), 'unknown report "pdf"'),
        (("--format", "sarif,junit", "-o", "x"), "--output takes one format"),
        (("--format", "sarif", "-o", "gone/x"), "gone/x: cannot be written"),
        (("--baseline", "gone.json"), "baseline gone.json: cannot be read"),
        (("--baseline", "distdiag-runs/a/report.json"), "not a baseline"),
        (("--fail-on", "sometimes"), "'sometimes' is not one of"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(distdiag, tmp_path, arguments, problem):
    runs_of(tmp_path, a=make_report())
    done = distdiag("report", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert problem in done.stderr


def test_what_a_baseline_knows_does_not_fail_a_report(distdiag, tmp_path):
    runs_of(tmp_path, a=make_report(make_finding(), make_warning(), make_note()))
    made = distdiag("baseline", "-o", "known.json")
    assert (made.returncode, made.stderr) == (0, "distdiag: 2 findings are in known.json\n")
    assert distdiag("report", "--baseline", "known.json", "--fail-on", "warning").returncode == 0
    shown = distdiag("report", "--baseline", "known.json", "--format", "json")
    assert json.loads(shown.stdout)["counts"] == {
        "error": 0,
        "warning": 0,
        "info": 1,
        "ignored": 0,
        "baselined": 2,
    }


def test_a_report_may_be_judged_by_new_rules(distdiag, tmp_path):
    runs_of(tmp_path, a=make_report(make_finding()))
    code = make_finding().code
    rule = f'[[ignore]]\ncodes = ["{code}"]\nreason = "meant"\n'
    (tmp_path / "rules.toml").write_text(rule)
    assert distdiag("report").returncode == 1
    shown = distdiag("report", "--config", "rules.toml", "--format", "json")
    assert shown.returncode == 0
    assert [each["reason"] for each in json.loads(shown.stdout)["ignored"]] == ["meant"]


def test_a_baseline_written_again_keeps_reasons_and_what_it_knew(distdiag, tmp_path):
    run = runs_of(tmp_path, a=make_report(make_finding())) / "a"
    distdiag("baseline", "-o", "known.json")
    known = json.loads((tmp_path / "known.json").read_text())
    known["findings"][0]["reason"] = "next quarter"
    (tmp_path / "known.json").write_text(json.dumps(known))
    accepted = distdiag("report", "--baseline", "known.json", "--format", "json")
    (run / "report.json").write_text(accepted.stdout)
    assert read_report(run).ignored[0].reason == "next quarter"
    distdiag("baseline", "-o", "known.json")
    again = json.loads((tmp_path / "known.json").read_text())
    assert again["findings"] == known["findings"]
