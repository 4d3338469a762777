"""``distdiag metrics``: what the curves of runs tell."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final, TypedDict, Unpack

import click
import msgspec

from distdiag.cli.show import format_option, tell
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Severity
from distdiag.metrics.assertions import check
from distdiag.metrics.compare import Comparison, compare
from distdiag.metrics.judging import judge_runs
from distdiag.metrics.picture import draw
from distdiag.metrics.reading import read
from distdiag.metrics.runs import Run, runs_of
from distdiag.metrics.summary import rows_of
from distdiag.metrics.text import MARKS, PLAIN_MARKS, Shown, lines_of
from distdiag.record.visible import json_text
from distdiag.record.wire import plain

COLORS: Final = {
    Severity.ERROR.value: "red",
    Severity.WARNING.value: "yellow",
    Severity.INFO.value: "cyan",
}
MOST_PROBLEMS: Final = 10
DEFAULT_WIDTH: Final = 80


class _Options(TypedDict):
    logs: tuple[Path, ...]
    compared: tuple[Path, Path] | None
    assertions: tuple[str, ...]
    name: str
    picture: Path | None
    names: tuple[str, ...]


@click.command("metrics")
@click.argument("logs", nargs=-1, metavar="LOG...", type=click.Path(path_type=Path))
@click.option(
    "--compare",
    "compared",
    nargs=2,
    metavar="A B",
    type=click.Path(path_type=Path),
    help="Say from which step on two runs part by more than their noise.",
)
@click.option(
    "--assert",
    "assertions",
    multiple=True,
    metavar="WHAT",
    help="Exit with 1 unless this holds: no-nan, no-collapse:100, no-divergence, no-spike, "
    "no-slowdown, no-warning, 'loss<3.5'.",
)
@format_option(["terminal", "json"], "terminal")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the curves into a .png or .svg, with marks at what was seen.",
)
@click.option(
    "--series",
    "names",
    multiple=True,
    metavar="NAME",
    help="Show and judge this series, or role (loss, grad_norm, lr, ...), alone.",
)
def command(**options: Unpack[_Options]) -> int:
    """Say what the curves of runs tell: where a loss spikes, diverges, or is no number.

    LOG is a log of a trainer, a table, an event file, or a folder of them. Exits with 1 if a curve
    shows an error or an assertion is not met, with 2 if no curve could be read, else with 0.
    """
    compared = options["compared"]
    problems: list[str] = []
    runs, comparison = _read(options["logs"], compared, problems)
    names = options["names"]
    series = rows_of(runs, names)
    if names and not series:
        raise UsageError(f"no run has a series {' or '.join(names)}")
    judgement = judge_runs(runs)
    verdicts = tuple(v for each in options["assertions"] for v in check(each, runs, judgement))
    if names:
        shown = {(row.run, row.series) for row in series}
        kept = (each for each in judgement.observations if (each.run, each.series) in shown)
        judgement = msgspec.structs.replace(judgement, observations=tuple(kept))
    if options["picture"] is not None:
        draw(runs, judgement, options["picture"], names)
    all_shown = Shown(
        series=series,
        judgement=judgement,
        assertions=verdicts,
        comparison=comparison,
        problems=tuple(problems),
    )
    _write(all_shown, runs, options["name"])
    return int(judgement.has_error or not all(verdict.holds for verdict in verdicts))


def _read(
    logs: tuple[Path, ...], compared: tuple[Path, Path] | None, problems: list[str]
) -> tuple[tuple[Run, ...], Comparison | None]:
    """Return the runs of the logs, or the two that are compared."""
    if compared is None:
        return _runs_of(logs, problems), None
    if logs:
        raise UsageError("--compare takes two logs, and no others stand beside them")
    pair = [_runs_of((path,), problems) for path in compared]
    for path, runs in zip(compared, pair, strict=True):
        if len(runs) > 1:
            held = ", ".join(run.name for run in runs[:4])
            raise UsageError(f"{path} holds {len(runs)} runs ({held}): name the file of one")
    names = _apart(pair[0][0].name, pair[1][0].name, compared)
    first, second = (Run(name, runs[0].curves) for name, runs in zip(names, pair, strict=True))
    return (first, second), compare(first, second)


def _apart(first: str, second: str, paths: tuple[Path, Path]) -> tuple[str, str]:
    if first != second:
        return first, second
    return (str(paths[0]), str(paths[1])) if paths[0] != paths[1] else ("A", "B")


def _runs_of(paths: tuple[Path, ...], problems: list[str]) -> tuple[Run, ...]:
    if not paths:
        raise UsageError("name at least one log: distdiag metrics LOG...")
    reading = read(paths)
    problems += [str(problem) for problem in reading.problems]
    runs = runs_of(reading.curves)
    if not runs:
        reasons = f" ({'; '.join(map(str, reading.problems[:3]))})" if reading.problems else ""
        raise UsageError(f"no curve was found in {', '.join(map(str, paths))}{reasons}")
    return runs


def _write(shown: Shown, runs: tuple[Run, ...], output: str) -> None:
    if output == "json":
        tree = msgspec.to_builtins(shown, enc_hook=plain)
        click.echo(json_text(tree), nl=False)
        return
    for problem in shown.problems[:MOST_PROBLEMS]:
        tell("metrics", problem)
    if len(shown.problems) > MOST_PROBLEMS:
        tell("metrics", f"and {len(shown.problems) - MOST_PROBLEMS} more problems (--format json)")
    is_terminal = sys.stdout.isatty()
    is_wide = is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    width = shutil.get_terminal_size().columns if is_wide else DEFAULT_WIDTH
    color = is_terminal and not os.environ.get("NO_COLOR")
    for text, style in lines_of(shown, runs, width=max(width, 40), marks=_marks()):
        click.echo(click.style(text, fg=COLORS.get(style), bold=True) if color and style else text)


def _marks() -> str:
    try:
        MARKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_MARKS
    return MARKS
