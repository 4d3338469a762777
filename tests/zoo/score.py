"""Score what a report says about a zoo script against what must be found."""

from pathlib import Path
from typing import Literal

import msgspec

from tests.zoo.expectation import Expectation

__all__ = [
    "FindingSummary",
    "Location",
    "Report",
    "Score",
    "matches",
    "read_report",
    "score_bug",
    "score_fix",
]

Severity = Literal["info", "warning", "error"]


class Location(msgspec.Struct, frozen=True):
    """A line of user code."""

    file: str
    line: int | None = None


class FindingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the score needs of one finding of report.json."""

    code: str
    severity: Severity
    message: str = ""
    ranks: tuple[int, ...] = ()
    location: Location | None = None
    subjects: tuple[str, ...] = ()

    @property
    def alarms(self) -> bool:
        """Tell whether the finding says that something is wrong."""
        return self.severity != "info"


class Report(msgspec.Struct, frozen=True):
    """What the score needs of report.json; further keys are ignored."""

    findings: tuple[FindingSummary, ...]
    complete: bool = False


class Score(msgspec.Struct, frozen=True):
    """Whether one script was judged rightly, by what, and why not."""

    passed: bool
    code: str = ""
    matched: tuple[str, ...] = ()
    reason: str = ""


def read_report(run_dir: Path) -> tuple[Report | None, str]:
    """Return the report below a run directory, or why there is none."""
    paths = sorted(run_dir.rglob("report.json"))
    if len(paths) != 1:
        return None, f"{len(paths)} report.json below the run directory"
    try:
        return msgspec.json.decode(paths[0].read_bytes(), type=Report), ""
    except msgspec.DecodeError as error:
        return None, f"report.json: {error}"


def matches(finding: FindingSummary, expectation: Expectation, script: Path) -> tuple[str, ...]:
    """Return which of rank, line and subject a finding of an expected family got right."""
    if finding.code[:3] not in expectation.families:
        return ()
    found = {
        "rank": _names_ranks(finding, expectation),
        "line": _names_line(finding.location, expectation, script),
        "subject": any(
            subject == wanted or subject.endswith(f".{wanted}")
            for subject in finding.subjects
            for wanted in expectation.subjects
        ),
    }
    return tuple(name for name, right in found.items() if right)


def _names_ranks(finding: FindingSummary, expectation: Expectation) -> bool:
    found, wanted = set(finding.ranks), set(expectation.ranks)
    if expectation.tie and found >= wanted:
        return True
    return bool(found) and found <= wanted


def _names_line(location: Location | None, expectation: Expectation, script: Path) -> bool:
    if location is None or location.line not in expectation.lines:
        return False
    # A relative name has no folder to compare; the run has no second bug.py.
    named = Path(location.file)
    return named == script or (not named.is_absolute() and named.name == script.name)


def score_bug(
    report: Report | None, expectation: Expectation, script: Path, *, error: str = ""
) -> Score:
    """Score the run of a bug: a hit names the family and the rank, the line or the subject."""
    if report is None:
        return Score(False, reason=error)
    alarms = [finding for finding in report.findings if finding.alarms]
    candidates = [(matches(finding, expectation, script), finding) for finding in alarms]
    matched, best = max(candidates, key=lambda c: len(c[0]), default=((), None))
    if best is None:
        return Score(False, reason="no finding of warning or above")
    if not matched:
        told = ", ".join(f"{f.code} ranks {list(f.ranks)} {_line_of(f)}" for f in alarms)
        return Score(False, best.code, reason=f"nothing that matches: {told}")
    if not report.complete:
        return Score(False, best.code, matched, "the report is not complete")
    return Score(True, best.code, matched)


def score_fix(report: Report | None, *, error: str = "") -> Score:
    """Score the run of a fix: it must have a complete report that accuses nobody."""
    if report is None:
        return Score(False, reason=error)
    for finding in report.findings:
        if finding.alarms:
            return Score(False, finding.code, reason=finding.message or finding.code)
    if not report.complete:
        return Score(False, reason="the report is not complete")
    return Score(True)


def _line_of(finding: FindingSummary) -> str:
    if finding.location is None:
        return "without a line"
    return f"{Path(finding.location.file).name}:{finding.location.line}"
