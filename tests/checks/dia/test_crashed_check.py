from distdiag.checks.dia.crashed_check import CrashedCheck
from distdiag.findings.finding import Severity


def test_the_failed_check_and_its_exception_are_named():
    finding = CrashedCheck().from_exception("COL003", KeyError("x"), "Traceback …")
    assert (finding.subjects, finding.severity) == (("COL003",), Severity.WARNING)
    assert "check COL003 failed" in finding.message
    assert finding.evidence[0].values == {"traceback": "Traceback …"}


def test_two_failed_checks_are_two_findings():
    found = [CrashedCheck().from_exception(code, ValueError(), "") for code in ("A", "B")]
    assert found[0].identity != found[1].identity
