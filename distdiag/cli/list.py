"""``distdiag list``: all checks, one a line."""

import click

from distdiag.cli.explain import catalogue, documentation
from distdiag.lint.base import Rule


@click.command("list")
def command() -> None:
    """List all checks. Only `distdiag lint` finds those marked static."""
    click.echo(f"{'code':6}  {'severity':8}  {'name':32}  what it detects")
    for check in catalogue().values():
        first = documentation(check).partition("\n")[0]
        static = "static: " if issubclass(check, Rule) else ""
        click.echo(f"{check.code:6}  {check.severity:8}  {check.name:32}  {static}{first}")
