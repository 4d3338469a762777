"""The report in a step of GitHub Actions: annotations of lines, and the summary of the job."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

from distdiag.findings.finding import Finding, Report
from distdiag.record.visible import visible
from distdiag.reports.base import Reporter, cut, phrase
from distdiag.reports.formats.markdown import MarkdownReporter
from distdiag.reports.places import place_of, relative_path, script_of
from distdiag.reports.workflow_commands import command

MOST_ANNOTATIONS: Final = 50
"""GitHub keeps no more of a job."""
LONGEST_TITLE: Final = 255
SUMMARY: Final = "GITHUB_STEP_SUMMARY"
"""The variable with the file whose Markdown GitHub shows on the page of the job."""


class GithubReporter(Reporter):
    """Write a workflow command for each finding, the worst first: GitHub shows ten of each kind."""

    name: ClassVar[str] = "github"

    def render(self, report: Report) -> str:
        """Return the commands; they work on stdout and on stderr."""
        return "".join(f"{line}\n" for line in self._lines(report))

    def _lines(self, report: Report) -> Iterator[str]:
        script = script_of(report)
        ordered = sorted(report.findings, key=lambda finding: -finding.severity.weight)
        for finding in ordered[:MOST_ANNOTATIONS]:
            yield _annotation(finding, script)
        counts = report.counts
        if counts.ignored or counts.baselined:
            yield f"distdiag: {counts.ignored} ignored and {counts.baselined} known findings"

    def append(self, report: Report) -> tuple[Path, str] | None:
        """Return the file of the job's summary, and the report as Markdown."""
        path = os.environ.get(SUMMARY)
        return (Path(path), MarkdownReporter().render(report)) if path else None


def _annotation(finding: Finding, script: str) -> str:
    place = place_of(finding)
    where = {}
    if place is not None:
        where = {"file": relative_path(place.file), "line": str(max(1, place.line))}
    elif script:
        where = {"file": relative_path(script)}
    who = f" [{phrase(finding.ranks)}]" if finding.ranks else ""
    fix = f"\nFix: {finding.fix}" if finding.fix else ""
    title = visible(cut(f"{finding.code} {finding.name}", LONGEST_TITLE))
    return command(finding.severity, where | {"title": title}, f"{finding.message}{who}{fix}")
