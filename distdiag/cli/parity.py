"""``distdiag parity`` tells whether a run on N ranks is the same as one on 1."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click

from distdiag.cli.torchrun import new_run_dir, reaches
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Severity
from distdiag.parity.lattice import in_order, origins
from distdiag.parity.runs import Configuration, Runs, Script, filled_in
from distdiag.parity.study import Outcome, Settings, Study
from distdiag.parity.verdict import report_of
from distdiag.reports import load_reporter, write_report
from distdiag.reports.base import visible

FOUND_STATUS: Final = 1


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--world-sizes",
    default="1,2",
    metavar="N,N,...",
    help="The numbers of ranks; the first one is the reference [1,2].",
)
@click.option(
    "--configuration",
    "named",
    multiple=True,
    metavar="NAME=N[:ARGS]",
    help="Instead: ways to run the script, with arguments more; the first one is the reference.",
)
@click.option("--steps", "num_steps", type=click.IntRange(min=1), default=10, help="[10]")
@click.option(
    "--replay/--same-global-batch",
    "is_replayed",
    default=True,
    help="Give all runs the recorded batches of the largest, or let each read its own [replay].",
)
@click.option(
    "--per-rank",
    default="",
    metavar="TEMPLATE",
    help='Arguments that depend on the run: "--batch-size {global_batch//world_size}".',
)
@click.option("--global-batch", type=click.IntRange(min=1), default=None, metavar="N")
@click.option(
    "--pad",
    "pads",
    multiple=True,
    metavar="NAME=VALUE",
    help="What fills up batches of unequal lengths, by the name of the tensor [0; labels: -100].",
)
@click.option(
    "--dropout",
    type=click.Choice(("on", "off")),
    default="on",
    help="off: nothing is dropped, in all runs [on].",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="The most runs at the same time [as many as there are cores, GPUs and memory for].",
)
@click.option("--timeout", "timeout_s", type=float, default=1800.0, metavar="SECONDS")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Keep recordings and report here.")
@click.option("--report", "name", default="terminal", help="Show it as terminal or json.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def parity(  # noqa: PLR0913 (click passes each option by name)
    world_sizes: str,
    named: tuple[str, ...],
    num_steps: int,
    is_replayed: bool,
    per_rank: str,
    global_batch: int | None,
    pads: tuple[str, ...],
    dropout: str,
    jobs: int | None,
    timeout_s: float,
    run_dir: Path | None,
    name: str,
    script: Path,
    script_args: tuple[str, ...],
) -> int:
    """Run SCRIPT on different numbers of ranks with the same data, and say what differs first.

    Losses, gradients, parameters and outputs of modules are compared by name. How far they may be
    apart is derived from the reference: it runs again, and again with all weights changed by one
    unit of rounding.

    Exits with 0 if nothing differs, 1 if something does, 2 if the runs cannot be compared.
    """
    started = time.time()
    if not script.is_file():
        raise UsageError(f"script {str(script)!r} does not exist")
    configurations = _configurations(world_sizes, named, per_rank, global_batch)
    if not is_replayed and not per_rank and not named:
        raise UsageError("--same-global-batch needs --per-rank, which makes the batches alike")
    folder = _empty(run_dir or new_run_dir())
    runs = Runs(folder.resolve(), Script(str(script), script_args), timeout_s)
    settings = Settings(num_steps, is_replayed, dropout, _padding(pads), jobs)  # type: ignore[arg-type]
    study = Study(folder.resolve(), runs, settings, _progress(len(configurations)))
    outcomes = study.compare(configurations)
    report = report_of(outcomes, tuple(sys.argv), folder, started)
    write_report(folder / "report.json", report)
    _show(outcomes)
    click.echo(load_reporter(name)().render(report), nl=False)
    return FOUND_STATUS if reaches(report, Severity.WARNING) else 0


def _empty(folder: Path) -> Path:
    if any(folder.glob("*")):
        raise UsageError(f"run directory {folder} is not empty")
    return folder


def _show(outcomes: Sequence[Outcome]) -> None:
    """Show how the runs compare, and what those that differ have in common."""
    for outcome in outcomes:
        click.echo(_table(outcome), err=True)
        if outcome.result.drawn_anew:
            click.echo(_anew(outcome), err=True)
    differs = {each.configuration.label: each.result.disparity is not None for each in outcomes}
    for origin in origins(differs) if len(differs) > 1 else ():
        click.echo(f"distdiag: parity: {origin.phrase()}", err=True)


def _configurations(
    world_sizes: str, named: tuple[str, ...], per_rank: str, global_batch: int | None
) -> list[Configuration]:
    names = {"global_batch": global_batch} if global_batch is not None else {}
    if named:
        found = [_named(each) for each in named]
    else:
        try:
            sizes = [int(size) for size in world_sizes.split(",")]
        except ValueError:
            raise UsageError(f"--world-sizes {world_sizes!r} is no list of numbers") from None
        if any(size < 1 for size in sizes):
            raise UsageError(f"--world-sizes {world_sizes!r}: a run has one rank at least")
        found = [
            Configuration(
                f"{size} rank{'s' if size > 1 else ''}",
                size,
                filled_in(per_rank, world_size=size, **names),
            )
            for size in sizes
        ]
    labels = [each.label for each in found]
    if len(set(labels)) < max(2, len(found)):
        raise UsageError("a comparison needs two runs, each under a name of its own")
    order = in_order(labels[1:])
    return [found[0], *sorted(found[1:], key=lambda each: order.index(each.label))]


def _named(text: str) -> Configuration:
    label, equals, rest = text.partition("=")
    number, _, arguments = rest.partition(":")
    if not (label and equals and number.isdecimal() and int(number)):
        raise UsageError(f"--configuration {text!r} is not NAME=N[:ARGS]")
    return Configuration(label, int(number), tuple(arguments.split()))


def _padding(pads: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for text in pads:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise UsageError(f"--pad {text!r} is not NAME=VALUE") from None
    return found


def _progress(num_configurations: int) -> Callable[[str], None]:
    number = 0
    total = num_configurations + 2

    def say(text: str) -> None:
        nonlocal number
        number += 1
        click.echo(f"distdiag: parity: run {number} of {total}: {visible(text)}", err=True)

    return say


def _table(outcome: Outcome) -> str:
    lines = [
        f"{outcome.configuration.label}: step, loss, reference's loss, worst ratio to the bound"
    ]
    for row in outcome.result.rows:
        ratios = "  ".join(f"{subject} {ratio:.2g}" for subject, ratio in row.ratios.items())
        lines.append(
            f"  {row.step:4d}  {row.candidate_loss:.7g}  {row.reference_loss:.7g}  {ratios}"
        )
    return "\n".join(lines)


def _anew(outcome: Outcome) -> str:
    names = outcome.result.drawn_anew
    return (
        f"distdiag: parity: {outcome.configuration.label}: {len(names)} parameters ({names[0]}) "
        "begin with other values of the same size, since each rank draws its own part: losses, "
        "gradients and updates are not compared"
    )
