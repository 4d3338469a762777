"""Which findings of a run count, and the exit status that they ask for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from distdiag.config import Config
from distdiag.events.errors import UsageError
from distdiag.findings.baseline import read_baseline
from distdiag.findings.finding import (
    Counts,
    Finding,
    IgnoredFinding,
    Outcome,
    Report,
    Severity,
)
from distdiag.findings.ignores import Ignores
from distdiag.reports.base import tool_version

FOUND_STATUS: Final = 1
_UNFINISHED: Final = (Outcome.FAILED, Outcome.HUNG, Outcome.ABORTED, Outcome.KILLED)


class Gate:
    """Decides whether a run passes: `fail_on` is the least severity that fails it, or ``never``."""

    def __init__(self, fail_on: str = "error", ignores: Ignores | None = None) -> None:
        self.fail_on = fail_on
        self._ignores = ignores or Ignores()
        self._least = None if fail_on == "never" else Severity(fail_on).weight

    def standing(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Return the findings that count."""
        return self._ignores.split(findings)[0]

    def fails(self, finding: Finding) -> bool:
        """Tell whether a finding that counts makes the run fail."""
        return self._least is not None and finding.severity.weight >= self._least

    def judged(self, report: Report) -> Report:
        """Return the report with what does not count apart, the counts and the exit status.

        What the report says to be ignored stays so.
        """
        findings, ignored = self._ignores.split(report.findings)
        ignored = (*report.ignored, *ignored)
        report = msgspec.structs.replace(
            report,
            tool_version=report.tool_version or tool_version(),
            findings=findings,
            ignored=ignored,
            counts=_counts(findings, ignored),
            fail_on=self.fail_on,
        )
        return msgspec.structs.replace(report, exit_status=self._status(report))

    def _status(self, report: Report) -> int:
        script = report.run.exit_status or 0
        # Of a job that is gone, and of stacks alone, only the findings are judged.
        is_observed = report.run.ended is not None and not report.files
        if not script and is_observed and report.run.outcome in _UNFINISHED:
            script = FOUND_STATUS
        return script or (FOUND_STATUS if any(map(self.fails, report.findings)) else 0)


def gate_of(config: Config) -> Gate:
    """Return what a configuration asks for. A baseline that cannot be read any more knows nothing.

    Whoever starts a run reads the baseline before, and refuses one that is damaged.
    """
    reasons: dict[str, str] = {}
    if config.baseline is not None:
        try:
            reasons = read_baseline(config.baseline).reasons
        except UsageError:
            logging.getLogger(__name__).exception("the baseline cannot be read")
    return Gate(config.fail_on, Ignores(config.ignored, reasons))


def _counts(findings: Iterable[Finding], ignored: Iterable[IgnoredFinding]) -> Counts:
    by_severity = Counter(finding.severity.value for finding in findings)
    ways = Counter("baselined" if each.by == "baseline" else "ignored" for each in ignored)
    return Counts(**by_severity, **ways)


def script_status(statuses: Iterable[int]) -> int | None:
    """Return the status of the rank that failed first, as a shell has it; None of no rank at all.

    `statuses` are in the order in which the scripts ended; -9 stands for SIGKILL. The launcher
    kills the peers of a rank that failed, so a status counts before a signal.
    """
    known = list(statuses)
    failed = sorted(filter(None, known), key=lambda status: status < 0)
    return shell_status(failed[0]) if failed else (0 if known else None)


def shell_status(status: int) -> int:
    """Return 137 for the -9 of a process that SIGKILL ended, and an exit status as it is."""
    return status if status >= 0 else 128 - status


def hint(report: Report) -> str:
    """Return what to say last of warnings that did not make the run fail; "" if there are none."""
    number = report.counts.warning
    if not number or report.exit_status or report.fail_on != "error":
        return ""
    found = "1 warning" if number == 1 else f"{number} warnings"
    return f"distdiag: exit status 0 in spite of {found}; --fail-on warning makes it 1.\n"
