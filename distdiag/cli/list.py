"""``distdiag list``: all checks, or all known faults, one a line."""

from collections.abc import Iterable
from typing import Any

import click
import msgspec

from distdiag.checks import Check
from distdiag.cli.explain import catalogue, first_line
from distdiag.cli.show import format_option
from distdiag.findings.known_faults import known_faults as read_faults
from distdiag.lint.base import Rule


@click.command("list")
@click.option(
    "--known-faults", is_flag=True, help="List the well-known faults of others in their place."
)
@format_option(["text", "json"], "text")
def command(*, known_faults: bool, name: str) -> None:
    """List all checks. Only `distdiag lint` finds those marked static."""
    rows = _faults() if known_faults else _checks()
    if name == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    elif known_faults:
        _list_faults()
    else:
        list_checks(catalogue().values())


def list_checks(checks: Iterable[type[Check[Any]] | type[Rule]]) -> None:
    """Write checks, one a line."""
    click.echo(f"{'code':6}  {'severity':8}  {'name':32}  what it detects")
    for check in checks:
        static = "static: " if issubclass(check, Rule) else ""
        first = first_line(check)
        click.echo(f"{check.code:6}  {check.severity:8}  {check.name:32}  {static}{first}")


def _checks() -> list[dict[str, object]]:
    return [
        {
            "code": check.code,
            "name": check.name,
            "severity": str(check.severity),
            "detects": first_line(check),
            "is_static": issubclass(check, Rule),
        }
        for check in catalogue().values()
    ]


def _faults() -> list[dict[str, object]]:
    rows = read_faults()
    return [{"name": row.id, "whose": row.whose, "happened": row.title} for row in rows]


def _list_faults() -> None:
    click.echo(f"{'name':27}  {'whose':8}  what happened")
    for row in read_faults():
        click.echo(f"{row.id:27}  {row.whose:8}  {row.title}")
