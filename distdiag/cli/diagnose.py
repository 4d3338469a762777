"""``distdiag diagnose``: name the cause that a folder of artifacts speaks for."""

from pathlib import Path

import click

from distdiag.cli.show import format_option
from distdiag.diagnosis.context import read_context
from distdiag.diagnosis.diagnose import diagnose
from distdiag.diagnosis.show import FORMATS
from distdiag.events.errors import UsageError
from distdiag.record.visible import visible

_INSUFFICIENT_STATUS = 3


@click.command("diagnose")
@click.argument("context", type=click.Path(path_type=Path), metavar="CONTEXT.json")
@click.option(
    *("-o", "--output"),
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the answer here, and only its summary to stdout.",
)
@format_option(FORMATS, None, "How to write the answer [that of the context, else json].")
def command(context: Path, output: Path | None, name: str | None) -> int:
    """Say why a training is wrong, from its artifacts.

    CONTEXT.json names artifacts (training_logs, loss_curves, model_code, error_messages, config:
    paths, texts or numbers), symptoms and constraints. Nothing of it is run or changed.

    Exits with 1 if a cause was found, 3 if the artifacts are not enough to look for one, else 0.
    """
    given = read_context(context)
    diagnosis = diagnose(given)
    text = FORMATS[name or given.output_format](diagnosis)
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
        click.echo(visible(f"{diagnosis.status}: {diagnosis.summary}"))
    if diagnosis.status == "insufficient":
        return _INSUFFICIENT_STATUS
    return 1 if diagnosis.root_causes else 0
