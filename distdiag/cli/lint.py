"""``distdiag lint``: what the source of a training program shows before it runs."""

from __future__ import annotations

import gc
from pathlib import Path

import click

from distdiag.config.selection import Selection
from distdiag.findings.finding import Severity
from distdiag.lint.linting import LintResult, lint_files
from distdiag.lint.reports import FORMATS

_FOUND_STATUS = 1
_UNREADABLE_STATUS = 2


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILES..."
)
@click.option(
    "--format",
    "name",
    type=click.Choice(list(FORMATS)),
    default="text",
    help="How to write the findings [text].",
)
@click.option("--select", default="", metavar="CODES", help="Apply these rules only.")
@click.option("--ignore", default="", metavar="CODES", help="Leave these rules out.")
def lint(paths: tuple[Path, ...], name: str, select: str, ignore: str) -> int:
    """Look for distributed mistakes in source, without running it.

    FILES are Python files, or folders that are searched for them. Calls are followed within the
    files that are given. `# distdiag: ignore[CODE]` on a line silences a rule there.

    Exits with 1 if something of severity warning or above was found, else with 2 if a file could
    not be read, else with 0.
    """
    # Syntax trees are many and live until the process ends, which is soon: the collector would
    # look at all of them again and again, and once more at the end.
    gc.disable()
    result = lint_files(paths, Selection(_codes(select), _codes(ignore)))
    gc.freeze()
    for problem in result.not_checked.values():
        click.echo(f"distdiag: {problem}", err=True)
    click.echo(FORMATS[name](result), nl=False)
    return _status(result)


def _status(result: LintResult) -> int:
    if result.worst is not None and result.worst.weight >= Severity.WARNING.weight:
        return _FOUND_STATUS
    return _UNREADABLE_STATUS if result.not_checked else 0


def _codes(text: str) -> tuple[str, ...]:
    return tuple(code.strip() for code in text.split(",") if code.strip())
