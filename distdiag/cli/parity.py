"""``distdiag parity``: whether a script on N ranks computes the same as on one."""

import sys
import time
from collections.abc import Sequence
from typing import Final, Unpack

import click

from distdiag.checks import load_checks
from distdiag.cli.options import CompareOptions, compare_options
from distdiag.cli.show import reaches, run_progress, show_report, tell
from distdiag.cli.torchrun import empty_folder
from distdiag.config.tasks import Dropout
from distdiag.events.comparisons import Divergence
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Report, Severity
from distdiag.parity.configurations import Configuration, filled_in, in_order, origins
from distdiag.parity.launcher import Script
from distdiag.parity.report import Comparing, accepting, report_of
from distdiag.parity.study import Outcome, Settings, Study
from distdiag.record.visible import visible_lines
from distdiag.reports import write_report
from distdiag.reports.gate import Gate

MODE: Final = "parity"
FOUND_STATUS: Final = 1
NUM_REPEATS: Final = 2
"""The reference runs so many times more."""


class _Options(CompareOptions):
    world_sizes: str
    named: tuple[str, ...]
    is_replayed: bool
    per_rank: str
    global_batch: int | None
    pads: tuple[str, ...]
    dropout: Dropout
    jobs: int | None
    accepted: tuple[str, ...]


@click.command("parity", context_settings={"allow_interspersed_args": False})
@click.option(
    "--world-sizes",
    default="1,2",
    metavar="N,N,...",
    help="Run on these numbers of ranks; the first is the reference [1,2].",
)
@click.option(
    "--configuration",
    "named",
    multiple=True,
    metavar="NAME=N[:ARGS]",
    help="Run these instead: N ranks, with ARGS added; the first is the reference.",
)
@click.option(
    "--replay/--same-global-batch",
    "is_replayed",
    default=True,
    help="Give all runs the batches of the largest one, or let each read its own [replay].",
)
@click.option(
    "--per-rank",
    default="",
    metavar="TEMPLATE",
    help='Add arguments that depend on the run: "--batch-size {global_batch//world_size}".',
)
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="The value of global_batch in --per-rank.",
)
@click.option(
    "--pad",
    "pads",
    multiple=True,
    metavar="NAME=VALUE",
    help="Pad tensor NAME of batches of unequal lengths with VALUE [0; labels: -100].",
)
@click.option(
    "--dropout",
    type=click.Choice(("on", "off")),
    default="on",
    help="off: switch dropout off in all runs [on].",
)
@click.option(
    "--accept",
    "accepted",
    multiple=True,
    metavar="CODE",
    help="Take what this check finds as meant: it is shown as a note.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Make at most N runs at the same time [as many as cores, GPUs and memory allow].",
)
@compare_options
def command(**options: Unpack[_Options]) -> int:
    """Compare a script on N ranks with one on 1.

    Run SCRIPT on different numbers of ranks with the same data, and name what differs first: a
    loss, a gradient, a parameter or the output of a module. The bound for each is measured: the
    reference runs again, and once more with all weights changed by one unit of rounding.

    Exits with 0 if nothing differs, 1 if something does, 2 if the runs cannot be compared.
    """
    started = time.time()
    script, is_replayed = options["script"], options["is_replayed"]
    folder = empty_folder(script, options["run_dir"])
    configurations = _configurations(options)
    unknown = sorted(set(options["accepted"]) - load_checks().keys())
    if unknown:
        raise UsageError(f"--accept {unknown[0]}: there is no such check")
    settings = Settings(
        num_steps=options["num_steps"],
        is_replayed=is_replayed,
        dropout=options["dropout"],
        padding=_padding(options["pads"]),
        most_at_once=options["jobs"],
        timeout_s=options["timeout_s"],
    )
    say = run_progress(MODE, len(configurations) + NUM_REPEATS)
    study = Study(folder, Script(str(script), options["script_args"]), settings, say)
    outcomes = study.compare(configurations)
    num_ranks = max(outcome.configuration.num_ranks for outcome in outcomes)
    report = _report(outcomes, Comparing(MODE, tuple(sys.argv), folder, started, num_ranks))
    report = accepting(report, options["accepted"])
    report = Gate("warning").judged(report)
    write_report(folder / "report.json", report)
    _show(outcomes)
    show_report(report, options["report_formats"], verbose=options["verbose"], run_dir=folder)
    return FOUND_STATUS if reaches(report, Severity.WARNING) else 0


def _report(outcomes: Sequence[Outcome], comparing: Comparing) -> Report:
    found = [each.result.divergence for each in outcomes]
    own = [outcome.own_report for outcome in outcomes if outcome.own_report is not None]
    return report_of(
        comparing,
        [each for each in found if each is not None],
        Divergence,
        ranks_of=own,
        findings_of=own,
        not_checked={
            f"{outcome.configuration.label}: {name}": why
            for outcome in outcomes
            for name, why in outcome.result.not_compared.items()
        },
    )


def _show(outcomes: Sequence[Outcome]) -> None:
    """Show how the runs compare, and what those that differ have in common."""
    for outcome in outcomes:
        click.echo(visible_lines(_table(outcome)), err=True)
        if outcome.result.drawn_anew:
            tell(MODE, _drawn_anew(outcome))
    differs = {each.configuration.label: each.result.divergence is not None for each in outcomes}
    for origin in origins(differs) if len(differs) > 1 else ():
        tell(MODE, origin.phrase())


def _configurations(options: _Options) -> list[Configuration]:
    world_sizes, global_batch = options["world_sizes"], options["global_batch"]
    names = {"global_batch": global_batch} if global_batch is not None else {}
    if options["named"]:
        found = [_named(each) for each in options["named"]]
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
                filled_in(options["per_rank"], world_size=size, **names),
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


def _drawn_anew(outcome: Outcome) -> str:
    names = outcome.result.drawn_anew
    return (
        f"{outcome.configuration.label}: each rank draws its own part of {len(names)} parameters "
        f"({names[0]}), so they begin with other values of the same size; losses, gradients and "
        "updates are not compared"
    )
