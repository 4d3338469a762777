"""``distdiag demo``: a healthy and a sick script, and the report of each."""

from pathlib import Path

import click

from distdiag.cli.show import reaches, show_report
from distdiag.cli.torchrun import new_run_dir, run_checked
from distdiag.demo import HEALTHY, SICK
from distdiag.findings.finding import Outcome, Report, Severity
from distdiag.reports import read_report


@click.command("demo")
def command() -> int:
    """Show a healthy and a sick script and their reports.

    Both run on two ranks. Exits with 1 if one of the reports is not what it should be.
    """
    healthy = _demo_run(HEALTHY, "a healthy script: nothing should be found")
    sick = _demo_run(SICK, "a sick script: each rank decides by itself when to stop")
    went_well = (
        healthy.run.outcome is Outcome.FINISHED
        and not reaches(healthy, Severity.WARNING)
        and reaches(sick, Severity.ERROR)
    )
    click.echo(f"demo: {'went as it should' if went_well else 'did NOT go as it should'}")
    return 0 if went_well else 1


def _demo_run(script: Path, what: str) -> Report:
    run_dir = new_run_dir() / script.stem
    click.echo(f"demo: {script.name}, {what}")
    flags = {"run_dir": str(run_dir), "report": ("json",), "on_hang": "abort", "hang_timeout": 10.0}
    status = run_checked(str(script), (), flags, num_ranks="2")
    click.echo(f"demo: {script.name} ended with status {status}\n")
    shown = read_report(run_dir)
    show_report(shown, ("terminal",))
    click.echo()
    return shown
