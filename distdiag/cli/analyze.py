"""``distdiag analyze``: check what a job left behind."""

from pathlib import Path
from typing import TypedDict, Unpack

import click

from distdiag.analysis import Progress, analyze
from distdiag.cli.options import codes
from distdiag.cli.show import reaches, report_option, show_report, verbose_option
from distdiag.config.selection import Selection
from distdiag.findings.finding import Severity


class _Options(TypedDict):
    paths: tuple[Path, ...]
    ranks_by_file: dict[str, int]
    report_format: str
    verbose: bool
    select: tuple[str, ...]
    ignore: tuple[str, ...]


def _ranks_by_file(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    found = {}
    for value in values:
        file, equals, rank = value.rpartition("=")
        if not (file and equals and rank.isdecimal()):
            raise click.BadParameter(f"{value!r} is not FILE=RANK", ctx, param)
        found[file] = int(rank)
    return found


@click.command("analyze")
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH..."
)
@click.option(
    "--rank",
    "ranks_by_file",
    multiple=True,
    metavar="FILE=RANK",
    callback=_ranks_by_file,
    help="The rank of a dump, if neither the name nor the content of FILE says it.",
)
@report_option
@verbose_option
@click.option(
    "--select", default="", callback=codes, metavar="CODES", help="Run only these checks [ALL]."
)
@click.option(
    "--ignore", default="", callback=codes, metavar="CODES", help="Leave these checks out."
)
def command(**options: Unpack[_Options]) -> int:
    """Check dumps, logs and run directories of a job.

    PATH is a dump of the flight recorder (pickle or JSON), of py-spy, gdb or faulthandler, a log,
    a run directory, a folder of such files or an archive of them. No code in them is run. Exits
    with 1 if an error was found.
    """
    with Progress() as progress:
        report = analyze(
            options["paths"],
            ranks_by_file=options["ranks_by_file"],
            selection=Selection(options["select"], options["ignore"]),
            progress=progress.show,
            complain=progress.complain,
        )
    show_report(report, options["report_format"], verbose=options["verbose"])
    return 1 if reaches(report, Severity.ERROR) else 0
