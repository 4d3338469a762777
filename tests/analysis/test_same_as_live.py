"""What a run left behind tells the same as its monitor did while it went on."""

from pathlib import Path

import pytest

from distdiag.analysis import analyze
from distdiag.findings.finding import Outcome, Severity
from distdiag.findings.report_json import decode_report
from tests.integration.launch import Launch

PROGRAM = Path(__file__).with_name("runs.py")
ABORT = ("--hang-timeout", "2", "--on-hang", "abort")


def findings(report):
    """Return all of a finding by which a reader tells it from others."""
    return sorted(
        (
            each.code,
            str(each.location),
            str(each.ranks),
            str(each.grade),
            str(each.severity),
            each.message,
            tuple(evidence.summary for evidence in each.evidence),
        )
        for each in report.findings
    )


@pytest.mark.parametrize(
    ("kind", "options", "outcome", "codes"),
    [
        ("healthy", (), Outcome.FINISHED, set()),
        ("race", (), Outcome.FINISHED, {"BAR001"}),
        ("raised", (), Outcome.FAILED, {"HNG001"}),
        ("killed", (), Outcome.KILLED, {"HNG002"}),
        ("uneven", ABORT, Outcome.ABORTED, {"COL011"}),
        ("waiting", ABORT, Outcome.ABORTED, {"COL011"}),
        ("given up", ("--hang-timeout", "2"), Outcome.HUNG, {"COL011", "HNG001"}),
    ],
)
def test_the_analysis_finds_what_the_live_run_found(tmp_path, kind, options, outcome, codes):
    run_dir = tmp_path / "run"
    done = Launch().checked(
        PROGRAM, [kind, str(tmp_path)], options=["--run-dir", str(run_dir), *options]
    )
    assert done.exit_status is not None, done.describe()
    live = decode_report((run_dir / "report.json").read_bytes())
    again = analyze([run_dir])
    assert live.complete
    assert live.run.outcome is outcome
    alarms = {each.code for each in live.findings if each.severity is not Severity.INFO}
    assert alarms == codes, done.describe()
    assert findings(again) == findings(live)
    assert again.run.outcome is live.run.outcome
    assert again.not_checked == live.not_checked
    assert again.checked == live.checked
    assert [rank.fate for rank in again.run.ranks] == [rank.fate for rank in live.run.ranks]
