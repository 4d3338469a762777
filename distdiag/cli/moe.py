"""``distdiag moe-determinism`` tells whether the same run routes tokens in the same way again."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import click

from distdiag.checks.moe.routing_differences import cause_phrase, nature_phrase
from distdiag.cli.torchrun import new_run_dir
from distdiag.events.comparisons import Nature
from distdiag.events.errors import UsageError
from distdiag.parity.routing.comparison import Comparison, Result, unmatched
from distdiag.parity.routing.twice import Plan, record_twice
from distdiag.parity.routing.verdict import report_of, table, write_tables
from distdiag.parity.runs import Script
from distdiag.reports import load_reporter, reporter_names, write_report
from distdiag.reports.base import visible

FOUND_STATUS: Final = 1
NOT_COMPARABLE_STATUS: Final = 2
TABLES: Final = "routing.json"


@click.command(name="moe-determinism", context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc-per-node",
    "num_ranks",
    type=click.IntRange(min=1),
    default=2,
    metavar="N",
    help="How many ranks to start [2].",
)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    default=10,
    metavar="N",
    help="End both runs after so many optimizer steps [10].",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=None,
    metavar="S",
    help="Seed Python, NumPy, torch and the order of sets in both runs, before the script does.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=1800.0,
    metavar="SECONDS",
    help="Give up a run that takes longer [1800].",
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Keep recordings and report here.")
@click.option("--report", "name", default="terminal", help="Show it as terminal or json.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def moe_determinism(  # noqa: PLR0913 (click passes each option by name)
    num_ranks: int,
    num_steps: int,
    seed: int | None,
    timeout_s: float,
    run_dir: Path | None,
    name: str,
    script: Path,
    script_args: tuple[str, ...],
) -> int:
    """Run SCRIPT twice, and say which token is the first that another expert gets.

    Every choice of every router is recorded: experts, margins, and digests of what the modules
    before it returned. Named are step, layer and token, what differed first (data, weights, random
    numbers, or a module that was given the same), and how many flips rounding may explain.

    Exits with 0 if all choices are the same, 1 if not, 2 if the runs cannot be compared.
    """
    started = time.time()
    folder = (run_dir or new_run_dir()).resolve()
    _refuse(script, folder, name)
    plan = Plan(folder, Script(str(script), script_args), num_ranks, num_steps, seed, timeout_s)
    first, again = record_twice(plan, _say)
    problem = next(unmatched(first, again), "")
    if problem:
        raise UsageError(f"the runs cannot be compared: {problem}")
    result = Comparison(first, again).run()
    if result.problem and result.difference is None:
        raise UsageError(f"the runs cannot be compared: {result.problem}")
    report = report_of(result, num_ranks, tuple(sys.argv), folder, started)
    write_report(folder / "report.json", report)
    write_tables(folder / TABLES, result)
    click.echo(table(result), err=True)
    _say(_verdict(result))
    click.echo(load_reporter(name)().render(report), nl=False)
    return _status(result)


def _refuse(script: Path, folder: Path, name: str) -> None:
    """Raise UsageError for what cannot be begun."""
    if not script.is_file():
        raise UsageError(f"script {str(script)!r} does not exist")
    if any(folder.glob("*")):
        raise UsageError(f"run directory {folder} is not empty")
    if name not in reporter_names():
        raise UsageError(f'unknown report "{name}" (there are: {", ".join(reporter_names())})')


def _say(text: str) -> None:
    click.echo(f"distdiag: moe-determinism: {visible(text)}", err=True)


def _verdict(result: Result) -> str:
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
