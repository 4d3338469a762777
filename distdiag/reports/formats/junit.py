"""The report as JUnit's XML, which CI servers show as a list of tests: one for each check."""

import re
from collections.abc import Iterable
from typing import ClassVar, Final
from xml.etree import ElementTree

from distdiag.checks import load_checks
from distdiag.findings.finding import Finding, IgnoredFinding, Outcome, Report
from distdiag.record.visible import visible_lines
from distdiag.reports.base import Reporter, cut, one_line, phrase
from distdiag.reports.gate import Gate

LONGEST_TEXT: Final = 20_000
"""A text is cut here, in characters: servers keep all of it in memory."""
MOST_ENTRIES: Final = 100
"""What XML 1.0 has no form for, and the carriage return, which readers change."""
_CHECK: Final = re.compile(r"[A-Z]+\d+")


class JunitReporter(Reporter):
    """Write a test for the run and for each check: passed, failed, or skipped as it did not look.

    A finding that does not make the run fail is told in the output of its test.
    """

    name: ClassVar[str] = "junit"
    file_name: ClassVar[str | None] = "report.junit.xml"

    def render(self, report: Report) -> str:
        """Return the document, in the form of Jenkins' schema junit-10.xsd."""
        suite = ElementTree.Element("testsuite", name="distdiag")
        _add_run(suite, report)
        found: dict[str, list[Finding]] = {code: [] for code in report.checked}
        for finding in report.findings:
            found.setdefault(finding.code, []).append(finding)
        gate = Gate(report.fail_on)
        for code in sorted(found):
            _add_check(suite, code, found[code], gate)
        for what, reason in report.not_checked.items():
            if _CHECK.fullmatch(what) and what not in found:
                case = _case(suite, what)
                ElementTree.SubElement(case, "skipped", message=_text(reason))
        _add_output(suite, _others(report))
        _count(suite, report)
        root = ElementTree.Element("testsuites", name="distdiag")
        root.append(suite)
        ElementTree.indent(root)
        body = ElementTree.tostring(root, encoding="unicode")
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _case(suite: ElementTree.Element, code: str) -> ElementTree.Element:
    check = load_checks().get(code)
    name = f"{code} {check.name}" if check is not None else code
    return ElementTree.SubElement(
        suite, "testcase", classname="distdiag", name=_text(name), time="0"
    )


def _add_run(suite: ElementTree.Element, report: Report) -> None:
    """Add the test that the script itself ended well."""
    case = ElementTree.SubElement(suite, "testcase", classname="distdiag", name="the run", time="0")
    run = report.run
    if run.exit_status or run.outcome not in (Outcome.FINISHED, Outcome.RUNNING):
        status = f"; exit status {run.exit_status}" if run.exit_status else ""
        failure = ElementTree.SubElement(
            case, "failure", type=str(run.outcome), message=f"the run: {run.outcome}{status}"
        )
        failure.text = _text(" ".join(run.command))


def _add_check(
    suite: ElementTree.Element, code: str, findings: Iterable[Finding], gate: Gate
) -> None:
    case = _case(suite, code)
    passing: list[str] = []
    for finding in list(findings)[:MOST_ENTRIES]:
        if gate.fails(finding):
            failure = ElementTree.SubElement(
                case, "failure", type=str(finding.severity), message=_text(finding.message)
            )
            failure.text = _text(_details(finding))
        else:
            passing.append(_details(finding))
    _add_output(case, passing)


def _details(finding: Finding) -> str:
    parts = [one_line(finding)]
    for entry in finding.evidence[:MOST_ENTRIES]:
        place = f" ({entry.location})" if entry.location else ""
        who = f"{phrase(entry.ranks)}: " if entry.ranks else ""
        parts.append(f"  {who}{entry.summary}{place}")
    if finding.fix:
        parts.append(f"Fix: {finding.fix}")
    return "\n".join(parts)


def _others(report: Report) -> list[str]:
    gaps = report.not_checked.items()
    unseen = [f"not observed: {k}: {reason}" for k, reason in gaps if not _CHECK.fullmatch(k)]
    return [*unseen[:MOST_ENTRIES], *map(_ignored, report.ignored[:MOST_ENTRIES])]


def _ignored(ignored: IgnoredFinding) -> str:
    why = f" ({ignored.reason})" if ignored.reason else ""
    return f"ignored by {ignored.by}{why}: {one_line(ignored.finding)}"


def _add_output(parent: ElementTree.Element, lines: list[str]) -> None:
    if lines:
        ElementTree.SubElement(parent, "system-out").text = _text("\n".join(lines))


def _count(suite: ElementTree.Element, report: Report) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", "0")
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    suite.set("time", "0")
    suite.set("timestamp", _text(report.run.started[:19]))


def _text(value: str) -> str:
    return visible_lines(cut(value, LONGEST_TEXT))  # what XML may not hold is not visible either
