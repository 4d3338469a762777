"""``distdiag moe-determinism``: whether the same run routes tokens in the same way again."""

import sys
import time
from typing import Final, Unpack

import click

from distdiag.checks.moe.routing_differences import cause_phrase, nature_phrase
from distdiag.cli.options import CompareOptions, compare_options
from distdiag.cli.show import run_progress, show_report, tell
from distdiag.cli.torchrun import empty_folder
from distdiag.events.comparisons import Nature, RoutingDifference
from distdiag.parity.launcher import Script
from distdiag.parity.report import Comparing, report_of
from distdiag.parity.routing.comparison import Result
from distdiag.parity.routing.study import RUNS, Settings, compare_twice, table, write_tables
from distdiag.record.visible import visible_lines
from distdiag.reports import write_report
from distdiag.reports.gate import Gate

MODE: Final = "moe-determinism"
FOUND_STATUS: Final = 1
NOT_COMPARABLE_STATUS: Final = 2
TABLES: Final = "routing.json"


class _Options(CompareOptions):
    num_ranks: int
    seed: int | None


@click.command(MODE, context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc-per-node",
    "num_ranks",
    type=click.IntRange(min=1),
    default=2,
    metavar="N",
    help="How many ranks to start [2].",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=None,
    metavar="S",
    help="Seed Python, NumPy, torch and the order of sets in both runs, before the script does.",
)
@compare_options
def command(**options: Unpack[_Options]) -> int:
    """Check whether two runs route tokens the same.

    Run SCRIPT twice and compare every choice of every router: the experts, by what margin they
    were chosen, and digests of what the modules before returned. Shows step, layer and token of
    the first difference, what led to it (data, weights, random numbers, or a module that was given
    the same), and how many other choices rounding may explain.

    Exits with 0 if all choices are the same, 1 if not, 2 if the runs cannot be compared.
    """
    started = time.time()
    script, num_ranks = options["script"], options["num_ranks"]
    folder = empty_folder(script, options["run_dir"])
    settings = Settings(num_ranks, options["num_steps"], options["seed"], options["timeout_s"])
    say = run_progress(MODE, len(RUNS))
    result, own = compare_twice(folder, Script(str(script), options["script_args"]), settings, say)
    report = report_of(
        Comparing(MODE, tuple(sys.argv), folder, started, num_ranks),
        [result.difference] if result.difference is not None else [],
        RoutingDifference,
        ranks_of=[own] if own is not None else [],
    )
    report = Gate("warning").judged(report)
    write_report(folder / "report.json", report)
    write_tables(folder / TABLES, result)
    click.echo(visible_lines(table(result)), err=True)
    tell(MODE, _summary(result))
    show_report(report, options["report_formats"], verbose=options["verbose"], run_dir=folder)
    return _status(result)


def _summary(result: Result) -> str:
    number = len(result.rows)
    tokens = sum(row.num_tokens for row in result.rows)
    compared = f"{number} choices of experts for {tokens} tokens were compared"
    if result.difference is not None:
        if _status(result) == NOT_COMPARABLE_STATUS:
            return (
                f"{compared}; the noise of a router, which its options ask for, is another one in "
                "each run, so they cannot be compared: --seed S gives both the same"
            )
        return f"{compared}, {result.difference.num_different} differ"
    if result.cause is None:
        return f"{compared}, all are the same, and so is what led to them"
    return (
        f"{compared}, all are the same, but {cause_phrase(result.cause)} "
        f"({nature_phrase(result.cause.nature)})"
    )


def _status(result: Result) -> int:
    if result.difference is None:
        return 0
    is_meant = result.difference.cause.nature is Nature.MEANT
    return NOT_COMPARABLE_STATUS if is_meant else FOUND_STATUS
