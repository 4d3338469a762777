"""Score what a report says about a zoo script against what must be found."""

from pathlib import Path
from typing import Literal

import msgspec

from tests.zoo.expectation import Expectation

__all__ = [
    "EvidenceSummary",
    "FindingSummary",
    "Location",
    "Report",
    "Score",
    "matches",
    "score_bug",
    "score_fix",
]

Severity = Literal["info", "warning", "error"]


class Location(msgspec.Struct, frozen=True):
    """A line of user code."""

    file: str
    line: int | None = None


class EvidenceSummary(msgspec.Struct, frozen=True):
    """What the score needs of one piece of evidence."""

    location: Location | None = None


class FindingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the score needs of one finding of report.json."""

    code: str
    severity: Severity
    message: str = ""
    ranks: tuple[int, ...] = ()
    location: Location | None = None
    subjects: tuple[str, ...] = ()
    evidence: tuple[EvidenceSummary, ...] = ()

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


def matches(finding: FindingSummary, expectation: Expectation, script: Path) -> tuple[str, ...]:
    """Return which of rank, line, sides and subject a finding of an expected family got right."""
    if finding.code[:3] not in expectation.families:
        return ()
    found = {
        "rank": _names_ranks(finding, expectation),
        "line": _line_in(finding.location, script) in expectation.lines,
        "sides": _shows_all_sides(finding, expectation, script),
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


def _line_in(location: Location | None, script: Path) -> int | None:
    """Return the line of the script that a location names, or None."""
    if location is None:
        return None
    # A relative name has no folder to compare; the run has no second bug.py.
    named = Path(location.file)
    is_script = named == script or (not named.is_absolute() and named.name == script.name)
    return location.line if is_script else None


def _shows_all_sides(finding: FindingSummary, expectation: Expectation, script: Path) -> bool:
    locations = [finding.location, *(evidence.location for evidence in finding.evidence)]
    shown = {_line_in(location, script) for location in locations}
    sides = expectation.evidence_lines
    return bool(sides) and all(shown.intersection(side) for side in sides)


def score_bug(report: Report | None, expectation: Expectation, script: Path) -> Score:
    """Score the run of a bug: a hit names the family and the rank, the line or the subject.

    Where the bug is a conflict between two lines, a hit names its line and shows both.
    """
    if report is None:
        return Score(False, reason="there is no report")
    alarms = [finding for finding in report.findings if finding.alarms]
    candidates = [(matches(finding, expectation, script), finding) for finding in alarms]
    needed = {"line", "sides"} if expectation.evidence_lines else set()
    matched, best = max(
        candidates, key=lambda c: (needed.issubset(c[0]), len(c[0])), default=((), None)
    )
    if best is None:
        return Score(False, reason="no finding of warning or above")
    if not matched or not needed.issubset(matched):
        reported = ", ".join(f"{f.code} ranks {list(f.ranks)} {_lines_of(f)}" for f in alarms)
        return Score(False, best.code, matched, f"nothing that matches: {reported}")
    if not report.complete:
        return Score(False, best.code, matched, "the report is not complete")
    return Score(True, best.code, matched)


def score_fix(report: Report | None) -> Score:
    """Score the run of a fix: it must have a complete report that accuses nobody."""
    if report is None:
        return Score(False, reason="there is no report")
    for finding in report.findings:
        if finding.alarms:
            return Score(False, finding.code, reason=finding.message or finding.code)
    if not report.complete:
        return Score(False, reason="the report is not complete")
    return Score(True)


def _lines_of(finding: FindingSummary) -> str:
    locations = [finding.location, *(evidence.location for evidence in finding.evidence)]
    named = [f"{Path(place.file).name}:{place.line}" for place in locations if place is not None]
    return " ".join(dict.fromkeys(named)) or "without a line"
