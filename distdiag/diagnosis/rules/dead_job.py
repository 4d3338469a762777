"""What `distdiag analyze` finds in the logs and dumps of the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distdiag.analysis import analyze
from distdiag.diagnosis.causes import FITS, SHOWN, SPOKEN, Clue, Evidence, Issue
from distdiag.diagnosis.documents import short_of
from distdiag.diagnosis.facts import NAN_LINE, Facts, spoken
from distdiag.diagnosis.rules.messages import issue_of, messages
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Finding, Grade, Report, Severity
from distdiag.findings.known_faults import KnownFault, known_faults

_WEIGHTS: Final = {Grade.PROVEN: SPOKEN, Grade.LIKELY: SHOWN}
_FAILED: Final = "HNG001"
"""The check that tells which exception ended a job."""
_LONG_ENOUGH: Final = 12
"""A shorter text may stand in any line."""


def dead_job(facts: Facts) -> Iterator[Clue]:
    """Yield the findings at warning or above as clues."""
    files = facts.documents.of("error_messages", "training_logs")
    paths = [document.path for document in files if document.path.stat().st_size]
    if not paths:
        return
    try:
        report = analyze(paths)
    except UsageError:
        return  # nothing in them is of a kind that can be checked
    for finding in report.findings:
        if finding.severity is not Severity.INFO and finding.grade in _WEIGHTS:
            evidence = _line_of(facts, finding) or _file_of(facts, finding, report)
            if evidence is not None:
                yield from _clues(facts, finding, evidence)


def _clues(facts: Facts, finding: Finding, evidence: Evidence) -> Iterator[Clue]:
    row = _row(finding)
    if row is not None and row.role != "cause":
        return
    if row is None and NAN_LINE.search(finding.message):
        return  # the program stopped because of a loss that curves and rules speak of
    issue = (
        issue_of(row)
        if row is not None
        else Issue(
            id=finding.code,
            title=finding.message,
            severity=finding.severity,
            fix=finding.fix,
            is_general=finding.code == _FAILED,
            wants=(("model_code", "the lines that the traceback names"),),
        )
    )
    yield Clue(issue, _WEIGHTS[finding.grade], (evidence,), "" if row else finding.message)
    if (site := _site(facts, finding)) is not None:
        yield Clue(issue, FITS, (site,))


def _row(finding: Finding) -> KnownFault | None:
    names = {value for e in finding.evidence for k, value in e.values.items() if k == "known_fault"}
    for row in (*messages(), *known_faults()):
        if row.id in names or (row in messages() and row.says(finding.message)):
            return row
    return None


def _line_of(facts: Facts, finding: Finding) -> Evidence | None:
    """Return the line of a log on which a finding rests."""
    for text in _texts(finding):
        for document, number, line in facts.lines():
            if text in line:
                return spoken(document, number, line)
    return None


def _file_of(facts: Facts, finding: Finding, report: Report) -> Evidence | None:
    """Return the first dump that was understood, with what the finding says of it."""
    understood = {file.path for file in report.files if file.kinds}
    for document in facts.documents.of("error_messages", "training_logs"):
        if str(document.path) in understood and finding.evidence:
            return Evidence(
                artifact=document.artifact,
                source=document.name,
                quote=short_of(finding.evidence[0].summary),
            )
    return None


def _texts(finding: Finding) -> Iterator[str]:
    for each in finding.evidence:
        for name in ("traceback", "text", "line"):
            value = each.values.get(name)
            if isinstance(value, str) and value.strip():
                yield from (
                    line.strip()[:200]
                    for line in value.strip().splitlines()[-1:]
                    if len(line.strip()) >= _LONG_ENOUGH
                )
        said = each.summary.partition("raised ")[2]
        if len(said) >= _LONG_ENOUGH:
            yield said.splitlines()[0][:200]


def _site(facts: Facts, finding: Finding) -> Evidence | None:
    """Return the line of the given code at which a finding is located."""
    place = finding.location
    if place is None:
        return None
    for code in facts.program.codes:
        is_same = Path(code.document.name).name == Path(place.file).name
        if is_same and 0 < place.line <= len(code.module.lines):
            return Evidence(
                artifact=code.document.artifact,
                source=code.document.name,
                line=place.line,
                quote=short_of(code.module.lines[place.line - 1]),
            )
    return None


RULES: Final = (dead_job,)
