"""The report as SARIF 2.1.0, which code hosts and editors show beside the code."""

from typing import Any, ClassVar, Final

from distdiag.checks import load_checks
from distdiag.findings.finding import (
    Evidence,
    Finding,
    IgnoredFinding,
    Location,
    Outcome,
    Report,
)
from distdiag.reports import sarif_log
from distdiag.reports.base import Reporter, cut, phrase
from distdiag.reports.places import place_of, relative_path, script_of
from distdiag.reports.words import by_severity

LONGEST_TEXT: Final = 4000
"""A text is cut here, in characters; code hosts refuse logs of more than 10 MB."""
MOST_RELATED: Final = 64
MOST_RESULTS: Final = 1000
FINGERPRINT: Final = "distdiag/v1"
_KINDS: Final = {"comment": "inSource", "configuration": "external", "baseline": "external"}


class SarifReporter(Reporter):
    """Write one log with one run: a result for each finding, ignored ones as suppressed."""

    name: ClassVar[str] = "sarif"
    file_name: ClassVar[str | None] = "report.sarif"

    def render(self, report: Report) -> str:
        """Return the log."""
        script = script_of(report)
        ordered = by_severity(report.findings)[:MOST_RESULTS]
        results = [_result(finding, script) for finding in ordered]
        room = MOST_RESULTS - len(results)
        results += [_suppressed(ignored, script) for ignored in report.ignored[:room]]
        used = {result["ruleId"] for result in results}
        rules = [check for code, check in load_checks().items() if code in used]
        problems = [f"{what}: {reason}" for what, reason in report.not_checked.items()]
        return sarif_log.log(
            rules,
            results,
            [_short(problem) for problem in problems[:MOST_RESULTS]],
            is_successful=report.run.outcome is Outcome.FINISHED,
        )


def _result(finding: Finding, script: str) -> dict[str, Any]:
    seen = [entry for entry in finding.evidence if entry.location is not None]
    # Code hosts show no result without a place.
    place = place_of(finding) or (Location(script, 1, "") if script else None)
    return {
        "ruleId": _short(finding.code),
        "level": sarif_log.LEVELS[finding.severity],
        "rank": round(100 * min(1.0, max(0.0, finding.confidence)), 1),
        "message": {"text": _short(_message(finding))},
        "locations": [_location(place)] if place is not None else [],
        "relatedLocations": [_related(entry) for entry in seen[:MOST_RELATED]],
        "partialFingerprints": {FINGERPRINT: _short(finding.fingerprint)},
        "properties": {
            "grade": finding.grade,
            "ranks": sarif_log.text(str(finding.ranks)),
            "step": finding.step,
            "subjects": [_short(subject) for subject in finding.subjects[:MOST_RELATED]],
            "fix": _short(finding.fix),
        },
    }


def _suppressed(ignored: IgnoredFinding, script: str) -> dict[str, Any]:
    suppression = {"kind": _KINDS[ignored.by], "justification": _short(ignored.reason)}
    return _result(ignored.finding, script) | {"suppressions": [suppression]}


def _message(finding: Finding) -> str:
    who = f" [{phrase(finding.ranks)}]" if finding.ranks else ""
    fix = f"\nFix: {finding.fix}" if finding.fix else ""
    return f"{finding.message}{who}{fix}"


def _location(place: Location) -> dict[str, Any]:
    region = {"startLine": max(1, place.line)}
    return sarif_log.location(relative_path(place.file), region)


def _related(entry: Evidence) -> dict[str, Any]:
    assert entry.location is not None
    ranks = f"{phrase(entry.ranks)}: " if entry.ranks else ""
    return _location(entry.location) | {"message": {"text": _short(f"{ranks}{entry.summary}")}}


def _short(value: str) -> str:
    return sarif_log.text(cut(value, LONGEST_TEXT))
