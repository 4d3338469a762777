"""``distdiag doctor``: looks whether a machine is fit for a training."""

import os
from pathlib import Path

import click
import msgspec

from distdiag.cli.show import format_option
from distdiag.doctor.answers import State, lines, worst
from distdiag.doctor.machine import look_at_machine
from distdiag.record.visible import json_text


@click.command("doctor")
@format_option(["text", "json"], "text")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Where runs will be kept [.].",
)
def command(*, name: str, run_dir: Path) -> int:
    """Look at this machine before a training runs on it: a line each, with what to do.

    To look at all nodes of a job, and at what is between them, start it by your launcher:
    torchrun ... -m distdiag.doctor.job

    Exits with 1 if there is a problem, else with 0.
    """
    answers = list(look_at_machine(os.environ, run_dir.absolute()))
    if name == "json":
        rows = [msgspec.structs.asdict(answer) for answer in answers]
        click.echo(json_text(rows), nl=False)
    else:
        click.echo("\n".join(lines(answers)))
    return int(worst(answers) is State.BAD)
