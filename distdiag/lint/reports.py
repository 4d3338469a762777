"""How the findings of `distdiag lint` are shown."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Related
from distdiag.lint.linting import LintResult
from distdiag.lint.rules import load_rules
from distdiag.record.visible import json_text, visible
from distdiag.reports import sarif_log
from distdiag.reports.workflow_commands import command


def text(result: LintResult) -> str:
    """Return the findings as ``path:line:column: CODE message``, then how many there are."""
    rows = [
        f"{found.path}:{found.line}:{found.column}: {found.code} "
        f"{'[info] ' if found.severity is Severity.INFO else ''}{found.message}"
        for found in result.findings
    ]
    return "\n".join([*map(visible, rows), _summary(result)]) + "\n"


def _summary(result: LintResult) -> str:
    files = f"{result.num_files} file{'' if result.num_files == 1 else 's'}"
    if not result.findings:
        return f"nothing found in {files}"
    counts = Counter(found.severity for found in result.findings)
    counted = (f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in Severity if counts[s])
    return f"found {', '.join(counted)} in {files}".replace("infos", "info")


def json(result: LintResult) -> str:
    """Return ``{"schema_version": 1, "num_files": …, "findings": […], "not_checked": {…}}``."""
    document = {
        "schema_version": 1,
        "num_files": result.num_files,
        "findings": result.findings,
        "not_checked": result.not_checked,
    }
    return json_text(document, indent=2)


def github(result: LintResult) -> str:
    """Return one workflow command for each finding, which GitHub shows in a pull request.

    A file that could not be looked at is an error, too.
    """
    rows = [_command(found) for found in result.findings]
    rows += [
        command(Severity.ERROR, {"file": path, "title": "not linted"}, problem)
        for path, problem in result.not_checked.items()
    ]
    return "".join(f"{row}\n" for row in rows)


def _command(found: LintFinding) -> str:
    place = {
        "file": found.path,
        "line": str(found.line),
        "endLine": str(found.end_line),
        "col": str(found.column),
        "title": f"{found.code} {found.name}",
    }
    return command(found.severity, place, found.message)


def sarif(result: LintResult) -> str:
    """Return one SARIF log with one run."""
    return sarif_log.log(
        load_rules().values(),
        map(_result, result.findings),
        result.not_checked.values(),
        is_successful=not result.not_checked,
    )


def _result(found: LintFinding) -> dict[str, object]:
    region = {"startLine": found.line, "startColumn": found.column, "endLine": found.end_line}
    return {
        "ruleId": found.code,
        "level": sarif_log.LEVELS[found.severity],
        "message": {"text": sarif_log.text(found.message)},
        "locations": [sarif_log.location(found.path, region)],
        "relatedLocations": [_related(place) for place in found.related],
    }


def _related(place: Related) -> dict[str, object]:
    message = {"message": {"text": sarif_log.text(place.message)}}
    return sarif_log.location(place.path, {"startLine": place.line}) | message


FORMATS: Final[Mapping[str, Callable[[LintResult], str]]] = {
    "text": text,
    "json": json,
    "sarif": sarif,
    "github": github,
}
"""Each takes a result and returns what is printed, with its last newline; "" prints nothing."""
