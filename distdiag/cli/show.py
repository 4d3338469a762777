"""How commands show a report, and how far they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click
from click.core import ParameterSource

from distdiag.events.errors import UsageError
from distdiag.findings.baseline import read_baseline
from distdiag.findings.finding import Report, Severity
from distdiag.record.run_dir import write_atomically
from distdiag.record.visible import visible
from distdiag.reports import load_reporter, reporter_names
from distdiag.reports.base import Reporter, append_to_its_file
from distdiag.reports.gate import hint
from distdiag.reports.surface import surface_of


def known_formats(text: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in one comma-separated list of formats of reports, or in several.

    Raises:
        UsageError: there is none of such a name.

    """
    lists = [text] if isinstance(text, str) else text
    names = [name.strip() for each in lists for name in each.split(",") if name.strip()]
    unknown = [name for name in names if name not in reporter_names()]
    if unknown or not names:
        wanted = unknown[0] if unknown else ""
        raise UsageError(f'unknown report "{wanted}" (there are: {", ".join(reporter_names())})')
    return tuple(dict.fromkeys(names))


F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")

_JSON: Final = "distdiag.json"


def _json_option(f: F) -> F:
    """Give a command ``--json``, which `_or_json` looks at: it is read before ``--format``."""
    return click.option(
        "--json",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=lambda ctx, _param, value: ctx.meta.update({_JSON: value}),
        help="The same as --format json.",
    )(f)


def _or_json(ctx: click.Context, param: click.Parameter, value: V) -> V | Literal["json"]:
    if not ctx.meta.get(_JSON):
        return value
    if ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--json and --format exclude each other", ctx)
    return "json"


def format_option(
    names: Iterable[str], default: str | None, text: str = "How to write it"
) -> Callable[[F], F]:
    """Return what gives a command ``--format`` and ``--json``, as its parameter `name`."""
    shown = f"{text} [{default}]." if default else text

    def decorate(f: F) -> F:
        choice = click.Choice(list(names))
        option = click.option(
            "--format", "name", type=choice, default=default, callback=_or_json, help=shown
        )
        return option(_json_option(f))

    return decorate


def report_option(*others: str) -> Callable[[F], F]:
    """Return what gives a command ``--format``, ``--report`` and ``--json``, for `show_report`.

    `others` are names that stand alone, and are no form of a report.
    """

    def names(
        ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
    ) -> tuple[str, ...]:
        formats = _or_json(ctx, param, given)
        return given if set(given) <= set(others) else known_formats(formats)

    def decorate(f: F) -> F:
        option = click.option(
            *("--format", "--report", "report_formats"),
            multiple=True,
            default=("terminal",),
            metavar="NAMES",
            callback=names,
            help=f"Show it as {_shown_names()} [terminal].",
        )
        return option(_json_option(f))

    return decorate


def _shown_names() -> str:
    *names, last = reporter_names()
    return f"{', '.join(names)} or {last}"


baseline_option = click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Do not count the findings that this file knows.",
)
"""The option that names a baseline; see `reasons_of`."""


def reasons_of(baseline: Path | None) -> dict[str, str]:
    """Return the reasons in a baseline by fingerprint; nothing where none is named.

    Raises:
        UsageError: the file is no baseline.

    """
    return read_baseline(baseline).reasons if baseline is not None else {}


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show which checks looked, and why each of the others did not.",
)
"""The option that asks for the details of a report."""


quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show errors only at the terminal.")
"""The option that asks for errors only."""


def show_report(
    report: Report,
    report_formats: Collection[str],
    *,
    verbose: bool = False,
    quiet: bool = False,
    run_dir: Path | None = None,
    traces: tuple[Path, ...] = (),
) -> None:
    """Write a report to stdout, in colour and as wide as the terminal if it is one.

    Of several forms those that are files go into the run directory, else into the working one.
    `traces` are files of a profiler, for forms that show them.
    """
    for name in report_formats:
        reporter = report_of_name(
            name, verbose=verbose, quiet=quiet, run_dir=run_dir, traces=traces
        )
        if reporter.file_name is not None and len(report_formats) > 1:
            save_report(report, reporter, (run_dir or Path()) / reporter.file_name)
        else:
            click.echo(reporter.render(report), nl=False)
        append_to_its_file(reporter, report)
    if not quiet:
        click.echo(hint(report), nl=False, err=True)


def report_of_name(
    name: str,
    *,
    verbose: bool,
    quiet: bool = False,
    run_dir: Path | None,
    traces: tuple[Path, ...] = (),
) -> Reporter:
    """Return the form of this name, as it is shown on stdout."""
    surface = surface_of(sys.stdout)
    return load_reporter(name)(
        width=surface.width,
        color=surface.color,
        verbose=verbose,
        quiet=quiet,
        run_dir=run_dir,
        traces=traces,
    )


def save_report(report: Report, reporter: Reporter, path: Path) -> None:
    """Write a form of a report to a file, and say on stderr which.

    Raises:
        UsageError: the file cannot be written.

    """
    try:
        write_atomically(path, reporter.render(report).encode(errors="backslashreplace"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    click.echo(f"distdiag: {reporter.name} report: {visible(str(path))}", err=True)


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
