"""``distdiag compare``: what differs between two runs, the likely causes first."""

from pathlib import Path

import click

from distdiag.cli.show import format_option
from distdiag.comparison import compare, facts_of, own_facts
from distdiag.comparison.text import json_of, text_of
from distdiag.events.errors import UsageError


@click.command("compare")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[BEFORE AFTER]")
@click.option(
    "--env", "is_capture", is_flag=True, help="Print a capture of this environment, for later."
)
@format_option(["text", "json"], "text")
@click.option("--all", "is_all", is_flag=True, help="Show all differences and all their lines.")
def command(runs: tuple[Path, ...], *, is_capture: bool, name: str, is_all: bool) -> int:
    """Show what differs between two runs, the likely causes first.

    BEFORE and AFTER are run directories, report.json files, or what `distdiag compare --env` has
    printed. Compared are arguments, source, seeds, settings, versions, environment variables,
    devices, sharding plans, and the first step at which data, weights or gradients differ.

    Exits with 1 if anything differs, else with 0.
    """
    if is_capture:
        if runs:
            raise UsageError("--env takes no runs: it prints what is here and now")
        click.echo(own_facts().decode(), nl=False)
        return 0
    if len(runs) != 2:
        raise UsageError("name two runs to compare (or --env)")
    before, after = map(facts_of, runs)
    found = compare(before, after)
    names = (str(runs[0]), str(runs[1]))
    text = json_of(found, names) if name == "json" else text_of(found, names, is_all=is_all)
    click.echo(text, nl=False)
    return 1 if found else 0
