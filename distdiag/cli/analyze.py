"""``distdiag analyze``: check what a job left behind."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, TypedDict, Unpack

import click

from distdiag.analysis import Progress, analyze, split_jobs
from distdiag.checks import load_checks
from distdiag.cli.options import codes
from distdiag.cli.show import (
    baseline_option,
    quiet_option,
    reasons_of,
    report_option,
    show_report,
    verbose_option,
)
from distdiag.config import load_config
from distdiag.config.selection import Selection
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Report
from distdiag.findings.ignores import Ignores
from distdiag.reports import reporter_names
from distdiag.reports.gate import Gate

_PIPE: Final = Path("-")


class _Options(TypedDict):
    paths: tuple[Path, ...]
    ranks_by_file: dict[str, int]
    report_formats: tuple[str, ...]
    baseline: Path | None
    config: str | None
    verbose: bool
    quiet: bool
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
@report_option()
@verbose_option
@quiet_option
@baseline_option
@click.option(
    "--select", default="", callback=codes, metavar="CODES", help="Run only these checks [ALL]."
)
@click.option(
    "--ignore", default="", callback=codes, metavar="CODES", help="Leave these checks out."
)
@click.option(
    "--config",
    metavar="FILE",
    help="Read which checks run and what is ignored from a TOML file [./distdiag.toml].",
)
def command(**options: Unpack[_Options]) -> int:
    """Check dumps, logs and run directories of a job.

    PATH is a dump of the flight recorder (pickle or JSON), of py-spy, gdb or faulthandler, a log,
    a run directory, a folder of such files or an archive of them; - is a log in a pipe. A folder
    may hold other things, too: `distdiag analyze .` passes over sources, checkpoints and data. No
    code in them is run. Exits with 1 if an error was found.
    """
    paths = [path for path in options["paths"] if path != _PIPE]
    piped = sys.stdin.buffer if len(paths) < len(options["paths"]) else None
    jobs = split_jobs(paths)
    config = load_config({key: options[key] or None for key in ("config", "select", "ignore")})
    config.validate(codes=load_checks(), reporters=reporter_names())
    reasons = reasons_of(options["baseline"] or config.baseline)
    gate = Gate(config.fail_on, Ignores(config.ignored, reasons))
    with Progress() as progress:
        found = _reports(jobs, piped, options, config.selection, progress)
        reports = [gate.judged(each) for each in found]
    for report in reports:
        show_report(
            report,
            options["report_formats"],
            verbose=options["verbose"],
            quiet=options["quiet"],
        )
    return max(report.exit_status or 0 for report in reports)


def _reports(
    jobs: Sequence[Sequence[Path]],
    piped: BinaryIO | None,
    options: _Options,
    selection: Selection,
    progress: Progress,
) -> Iterator[Report]:
    """Yield a report for each job; one that has nothing to check is told in one line.

    Raises:
        UsageError: no job has anything to check.

    """
    problems: list[UsageError] = []
    for paths in jobs:
        try:
            yield analyze(
                paths,
                stream=piped,
                ranks_by_file=options["ranks_by_file"],
                selection=selection,
                progress=progress.show,
                complain=progress.complain,
            )
        except UsageError as error:
            problems.append(error)
        piped = None  # it is of the first job, and can be read once
    if len(problems) == len(jobs):
        raise problems[0]
    for problem in problems:
        progress.complain(str(problem))
