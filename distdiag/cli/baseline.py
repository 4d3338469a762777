"""``distdiag baseline``: accept what a run has found, so that only new findings fail later ones."""

from pathlib import Path

import click

from distdiag.cli.runs import newest_run
from distdiag.events.errors import UsageError
from distdiag.findings.baseline import (
    baseline_of,
    encode_baseline,
    read_baseline,
    with_reasons,
)
from distdiag.findings.finding import Severity
from distdiag.record.visible import visible
from distdiag.reports import read_report
from distdiag.reports.base import tool_version


@click.command("baseline")
@click.argument("path", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
@click.option(
    *("-o", "--output"),
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it into FILE [stdout]. Reasons that FILE has already are kept.",
)
def command(path: Path | None, output: Path | None) -> None:
    """Accept the errors and warnings of a run.

    RUN is a run directory or a report.json, by default the newest run below ./distdiag-runs. Runs
    with `--baseline FILE` do not count what FILE knows. A finding is known by its code, subjects,
    function and the text of its line; an entry may be given a reason by hand.
    """
    report = read_report(path or newest_run())
    known_before = [each.finding for each in report.ignored if each.by == "baseline"]
    findings = [f for f in report.findings if f.severity is not Severity.INFO]
    baseline = baseline_of([*findings, *known_before], tool_version=tool_version())
    if output is None:
        click.echo(encode_baseline(baseline), nl=False)
        return
    reasons = read_baseline(output).reasons if output.exists() else {}
    try:
        output.write_bytes(encode_baseline(with_reasons(baseline, reasons)))
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    number = len(baseline.findings)
    findings_are = "1 finding is" if number == 1 else f"{number} findings are"
    click.echo(f"distdiag: {findings_are} in {visible(str(output))}", err=True)
