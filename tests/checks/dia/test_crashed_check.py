from distdiag.checks.dia.crashed_check import Crash, CrashedCheck
from distdiag.findings.finding import Severity
from tests.checks.verdicts import findings


def test_the_failed_check_and_its_exception_are_named():
    (finding,) = findings(CrashedCheck, Crash("check COL003", KeyError("x"), "Traceback …"))
    assert (finding.subjects, finding.severity) == (("COL003",), Severity.WARNING)
    assert "check COL003 failed" in finding.message
    assert finding.evidence[0].values == {"traceback": "Traceback …"}


def test_two_failed_checks_are_two_findings():
    (first,), (second,) = (
        findings(CrashedCheck, Crash(f"check {c}", ValueError(), "")) for c in "AB"
    )
    assert first.identity != second.identity
