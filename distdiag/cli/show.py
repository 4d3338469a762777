"""How commands show a report, and how far they are."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import click

from distdiag.events.errors import UsageError
from distdiag.findings.finding import Report, Severity
from distdiag.reports import load_reporter, reporter_names
from distdiag.reports.base import visible


def known_format(name: str) -> str:
    """Return the name of a format of reports.

    Raises:
        UsageError: there is none of this name.

    """
    if name not in reporter_names():
        raise UsageError(f'unknown report "{name}" (there are: {", ".join(reporter_names())})')
    return name


report_option = click.option(
    "--report",
    "report_format",
    default="terminal",
    metavar="NAME",
    callback=lambda _ctx, _param, name: known_format(name),
    help="Show the report as terminal or json [terminal].",
)
"""The option that says how to show a report."""

verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show which checks looked, and why each of the others did not.",
)
"""The option that asks for the details of a report."""


def show_report(
    report: Report, report_format: str, *, verbose: bool = False, run_dir: Path | None = None
) -> None:
    """Write a report to stdout, in colour and as wide as the terminal if it is one."""
    reporter = load_reporter(report_format)
    if report_format == "terminal" and sys.stdout.isatty():
        width, color = shutil.get_terminal_size().columns, "NO_COLOR" not in os.environ
        text = reporter(width=width, color=color, verbose=verbose).render(report)
    else:
        text = reporter(verbose=verbose, run_dir=run_dir).render(report)
    click.echo(text, nl=False)


def reaches(report: Report, severity: Severity) -> bool:
    """Tell whether a finding is at least this severe."""
    return any(finding.severity.weight >= severity.weight for finding in report.findings)


def run_progress(mode: str, num_runs: int) -> Callable[[str], None]:
    """Return a function that says on stderr which run begins; there may be more runs than these."""
    numbers = count(1)

    def say(name: str) -> None:
        number = next(numbers)
        run = f"run {number} of {num_runs}" if number <= num_runs else "one more run"
        tell(mode, f"{run}: {name}")

    return say


def tell(mode: str, text: str) -> None:
    """Say something on stderr in one line."""
    click.echo(f"distdiag: {mode}: {visible(text)}", err=True)
