"""Which findings count, and the exit status that a report asks for."""

import json

import pytest

from distdiag.config import Config
from distdiag.config.ignores import IgnoreRule
from distdiag.findings.baseline import baseline_of, encode_baseline
from distdiag.findings.finding import Counts, Outcome, Report
from distdiag.findings.fingerprint import fingerprint_of
from distdiag.findings.report_json import decode_report, encode_report
from distdiag.reports.gate import Gate, gate_of, hint, script_status
from tests.reports.samples import make_finding, make_note, make_report, make_run, make_warning

RULE = IgnoreRule(codes=("COL010",), reason="so")


def test_a_report_says_what_it_comes_to():
    report = make_report(make_finding(), make_warning(), make_note())
    assert report.counts == Counts(error=1, warning=1, info=1)
    assert (report.exit_status, report.fail_on) == (1, "error")
    assert report.tool_version
    assert [f.fingerprint for f in report.findings] == [fingerprint_of(f) for f in report.findings]
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize(
    ("fail_on", "findings", "status"),
    [
        ("error", [make_finding()], 1),
        ("error", [make_warning()], 0),
        ("warning", [make_warning()], 1),
        ("warning", [make_note()], 0),
        ("never", [make_finding()], 0),
        ("error", [], 0),
    ],
)
def test_the_worst_finding_decides(fail_on, findings, status):
    assert make_report(*findings, gate=Gate(fail_on)).exit_status == status


@pytest.mark.parametrize(
    ("outcome", "script", "status"),
    [
        (Outcome.FINISHED, 0, 0),
        (Outcome.FINISHED, None, 0),
        (Outcome.FAILED, 3, 3),
        (Outcome.FAILED, None, 1),
        (Outcome.HUNG, None, 1),
        (Outcome.KILLED, 137, 137),
    ],
)
def test_the_script_decides_before_the_findings(outcome, script, status):
    report = make_report(run=make_run(outcome, exit_status=script), gate=Gate("never"))
    assert report.exit_status == status


def test_of_a_job_that_is_gone_only_the_findings_count():
    report = make_report(run=make_run(Outcome.FAILED, exit_status=None, ended=None))
    assert report.exit_status == 0


def test_what_does_not_count_stands_apart_with_its_reason(tmp_path):
    known = tmp_path / "known.json"
    known.write_bytes(encode_baseline(baseline_of([make_finding()], tool_version="1")))
    gate = gate_of(Config(fail_on="warning", ignored=(RULE,), baseline=known))
    report = make_report(make_finding(), make_warning(), make_note(), gate=gate)
    assert report.counts == Counts(info=1, ignored=1, baselined=1)
    assert report.exit_status == 0
    assert [(each.finding.code, each.by) for each in report.ignored] == [
        ("COL003", "baseline"),
        ("COL010", "configuration"),
    ]
    # Judged again by somebody who was told of nothing, it says the same.
    assert Gate("warning").judged(report) == report


def test_a_baseline_that_is_gone_meanwhile_knows_nothing(tmp_path):
    gate = gate_of(Config(baseline=tmp_path / "gone.json"))
    assert make_report(make_finding(), gate=gate).exit_status == 1


@pytest.mark.parametrize(
    ("findings", "fail_on", "said"),
    [
        (
            [make_warning()],
            "error",
            "exit status 0 in spite of 1 warning; --fail-on warning makes it 1",
        ),
        ([make_warning(), make_warning()], "error", "exit status 0 in spite of 2 warnings"),
        ([make_finding(), make_warning()], "error", ""),
        ([make_warning()], "warning", ""),
        ([make_warning()], "never", ""),
        ([make_note()], "error", ""),
    ],
)
def test_warnings_that_change_nothing_are_told_of_last(findings, fail_on, said):
    text = hint(make_report(*findings, gate=Gate(fail_on)))
    assert said in text
    assert bool(text) == bool(said)


def test_a_report_of_an_older_version_is_still_read():
    text = encode_report(Report(run=make_run(), findings=(make_finding(),))).decode()
    for key in ("tool_version", "counts", "fail_on", "exit_status", "ignored", "fingerprint"):
        assert f'"{key}"' in text
    tree = json.loads(text)
    for key in ("tool_version", "counts", "fail_on", "exit_status", "ignored"):
        del tree[key]
    del tree["run"]["exit_status"], tree["findings"][0]["fingerprint"]
    report = decode_report(json.dumps(tree).encode())
    assert report.exit_status is None
    assert Gate().judged(report).exit_status == 1


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([], None), ([0, 0], 0), ([-15, 5], 5), ([3, 1], 3), ([-9, -15], 137), ([0, -11], 139)],
)
def test_the_rank_that_failed_first_gives_the_status(statuses, expected):
    assert script_status(statuses) == expected
