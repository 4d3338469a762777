"""``distdiag lint``: find mistakes in the source of a training program before it runs."""

import gc
import sys
from pathlib import Path

import click

from distdiag.cli.options import codes
from distdiag.cli.show import format_option
from distdiag.config.selection import Selection
from distdiag.findings.finding import Severity
from distdiag.lint.linting import LintResult, lint_files
from distdiag.lint.reports import FORMATS
from distdiag.lint.sources import STDIN
from distdiag.record.visible import visible

_FOUND_STATUS = 1
_UNREADABLE_STATUS = 2


@click.command("lint")
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILES..."
)
@format_option(FORMATS, "text", "How to write the findings")
@click.option(
    "--select", default="", callback=codes, metavar="CODES", help="Apply only these rules [ALL]."
)
@click.option(
    "--ignore", default="", callback=codes, metavar="CODES", help="Leave these rules out."
)
def command(
    paths: tuple[Path, ...], name: str, select: tuple[str, ...], ignore: tuple[str, ...]
) -> int:
    """Find distributed mistakes in source files.

    FILES are Python files or folders of them, and - is what is piped in; nothing is run. Calls are
    followed within the files that are given. A comment `# distdiag: ignore[CODE]` silences a rule
    on its line.

    Exits with 1 if something of severity warning or above was found, else with 2 if a file could
    not be read, else with 0.
    """
    # Syntax trees are many and live until the process ends, which is soon: the collector would
    # look at all of them again and again, and once more at the end.
    gc.disable()
    piped = sys.stdin.buffer.read() if STDIN in paths else b""
    result = lint_files(paths, Selection(select, ignore), piped.decode("utf-8-sig", "replace"))
    gc.freeze()
    for problem in result.not_checked.values():
        click.echo(f"distdiag: {visible(problem)}", err=True)
    click.echo(FORMATS[name](result), nl=False)
    return _status(result)


def _status(result: LintResult) -> int:
    if result.worst is not None and result.worst.weight >= Severity.WARNING.weight:
        return _FOUND_STATUS
    return _UNREADABLE_STATUS if result.not_checked else 0
