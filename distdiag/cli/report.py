"""``distdiag report``: show the report of a run again, and exit as the run did."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict, Unpack, get_args

import click

from distdiag.cli.runs import newest_run, runs_below
from distdiag.cli.show import (
    baseline_option,
    quiet_option,
    reasons_of,
    report_of_name,
    report_option,
    save_report,
    show_report,
    verbose_option,
)
from distdiag.config import Config, FailOn, load_config
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Report, Severity
from distdiag.findings.ignores import Ignores
from distdiag.record.visible import visible
from distdiag.replay import replay_source
from distdiag.reports import one_line, read_report
from distdiag.reports.gate import Gate
from distdiag.reports.words import by_severity, ending_of, found_phrase

REPLAY: Final = "pytest"
"""The word for a test that replays a finding; it is no form of a report."""
TENSORBOARD: Final = "tensorboard"
"""The word for event files: a folder of them, and no text."""


class _Options(TypedDict):
    path: Path | None
    report_formats: tuple[str, ...]
    output: Path | None
    traces: tuple[Path, ...]
    baseline: Path | None
    config: str | None
    fail_on: FailOn | None
    verbose: bool
    quiet: bool


@click.command("report")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@report_option(REPLAY, TENSORBOARD)
@click.option(
    *("-o", "--output"),
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it into FILE.",
)
@click.option(
    "--trace",
    "traces",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Put a trace of torch's profiler beside its rank, in the format perfetto.",
)
@click.option(
    "--fail-on",
    type=click.Choice(get_args(FailOn)),
    help="Exit with 1 at a finding this bad [as the run was told].",
)
@baseline_option
@click.option(
    "--config", metavar="FILE", help="Ignore what a TOML file such as distdiag.toml says, too."
)
@verbose_option
@quiet_option
def command(**options: Unpack[_Options]) -> int:
    """Show the report of a run again.

    PATH is a report.json, a run directory, or a folder of them; without it the newest run below
    ./distdiag-runs is taken. `--format pytest` writes a test that replays a finding of
    collectives, `--format tensorboard -o FOLDER` event files with the curves and the findings.
    Exits as the run did: with the status of the script if that failed, with 1 if a finding reaches
    --fail-on, else with 0.
    """
    path = options["path"] or newest_run()
    if options["report_formats"] == (REPLAY,):
        click.echo(replay_source(path), nl=False)
        return 0
    if options["report_formats"] == (TENSORBOARD,):
        return _write_event_files(path, options)
    formats = options["report_formats"]
    if options["output"] is not None and len(formats) > 1:
        raise UsageError("--output takes one format")
    if options["traces"] and "perfetto" not in formats:
        raise UsageError("--trace needs --format perfetto")
    runs = runs_below(path)
    if not runs:
        return _show(path, options, formats)
    if formats != ("terminal",):
        raise UsageError(f"{path} holds {len(runs)} runs: name one of them to get another format")
    return max([_show_briefly(run, options) for run in runs])


def _read(path: Path, options: _Options) -> Report:
    """Read a report and judge it anew where the options ask for it."""
    report = read_report(path)
    if (
        options["fail_on"] is None
        and options["baseline"] is None
        and options["config"] is None
        and report.exit_status is not None
    ):
        return report
    config = load_config({"config": options["config"]}) if options["config"] else Config()
    reasons = reasons_of(options["baseline"] or config.baseline)
    ignores = Ignores(config.ignored, reasons)
    return Gate(options["fail_on"] or report.fail_on, ignores).judged(report)


def _write_event_files(path: Path, options: _Options) -> int:
    from distdiag.metrics.event_writer import write_event_files

    folder = options["output"]
    if folder is None:
        raise UsageError("--format tensorboard needs a folder: -o FOLDER")
    report = _read(path, options)
    num_files = write_event_files(report, path if path.is_dir() else path.parent, folder)
    click.echo(f"distdiag: {num_files} event files below {visible(str(folder))}", err=True)
    return report.exit_status or 0


def _show(path: Path, options: _Options, formats: Sequence[str]) -> int:
    report = _read(path, options)
    run_dir = path if path.is_dir() else path.parent
    verbose, traces = options["verbose"], options["traces"]
    if options["output"] is not None:
        reporter = report_of_name(formats[0], verbose=verbose, run_dir=run_dir, traces=traces)
        save_report(report, reporter, options["output"])
    else:
        show_report(
            report,
            formats,
            verbose=verbose,
            quiet=options["quiet"],
            run_dir=run_dir,
            traces=traces,
        )
    return report.exit_status or 0


def _show_briefly(path: Path, options: _Options) -> int:
    """Show one of several runs: its verdict, and a line for each finding that is no note."""
    report = _read(path, options)
    click.echo(f"{visible(str(path))}: {found_phrase(report)}; {ending_of(report)}")
    for finding in by_severity(report.findings):
        if finding.severity is not Severity.INFO or options["verbose"]:
            click.echo(f"  {one_line(finding).removeprefix('distdiag: ')}")
    return report.exit_status or 0
