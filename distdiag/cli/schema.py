"""``distdiag schema``: the JSON Schema of report.json."""

import json

import click

from distdiag.findings.report_json import report_schema


@click.command("schema")
def command() -> None:
    """Print the JSON Schema of report.json."""
    click.echo(json.dumps(report_schema(), indent=2))
