"""``distdiag list``: all checks, or all known faults, one a line."""

import click

from distdiag.cli.explain import catalogue, documentation
from distdiag.findings.known_faults import known_faults as read_faults
from distdiag.lint.base import Rule


@click.command("list")
@click.option(
    "--known-faults", is_flag=True, help="List the well-known faults of others in their place."
)
def command(*, known_faults: bool) -> None:
    """List all checks. Only `distdiag lint` finds those marked static."""
    if known_faults:
        _list_faults()
        return
    click.echo(f"{'code':6}  {'severity':8}  {'name':32}  what it detects")
    for check in catalogue().values():
        first = documentation(check).partition("\n")[0]
        static = "static: " if issubclass(check, Rule) else ""
        click.echo(f"{check.code:6}  {check.severity:8}  {check.name:32}  {static}{first}")


def _list_faults() -> None:
    click.echo(f"{'name':27}  {'whose':8}  what happened")
    for row in read_faults():
        click.echo(f"{row.id:27}  {row.whose:8}  {row.title}")
