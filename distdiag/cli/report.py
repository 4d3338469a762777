"""``distdiag report``: show the report of a run again."""

from pathlib import Path

import click

from distdiag.cli.show import known_format, show_report, verbose_option
from distdiag.replay import replay_source
from distdiag.reports import read_report


@click.command("report")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    *("--report", "--format", "name"),
    default="terminal",
    metavar="NAME",
    help="Show it as terminal, html or json [terminal]; pytest writes a test that replays a "
    "finding of collectives.",
)
@verbose_option
def command(path: Path, name: str, verbose: bool) -> None:
    """Show the report of a run again. PATH is a report.json or a run directory."""
    if name == "pytest":
        click.echo(replay_source(path), nl=False)
        return
    report_format = known_format(name)
    run_dir = path if path.is_dir() else path.parent
    show_report(read_report(path), report_format, verbose=verbose, run_dir=run_dir)
