"""From a comparison of two recordings to a report, and to tables that a program can draw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from distdiag.checks import load_checks
from distdiag.checks.moe.routing_differences import bin_label
from distdiag.engine import Engine
from distdiag.events.comparisons import MarginBin, RoutingDifference
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome, Report, Run
from distdiag.parity.routing.comparison import Result, Row
from distdiag.parity.routing.twice import RUNS, own_report

# The comparison as text: choices that differ, and the margins of all tokens.

_MOST_ROWS: Final = 20
_WIDTH: Final = 24


def table(result: Result) -> str:
    """Return the choices that differ, and a histogram of the margins."""
    return "\n".join([*_rows(result.rows), *_histogram(result.margins)])


def _rows(rows: Sequence[Row]) -> list[str]:
    flipped = sorted(
        (row for row in rows if row.num_flipped), key=lambda row: (row.step, row.micro)
    )
    if not flipped:
        return []
    lines = ["step  micro  rank  flipped  of tokens  greatest margin (roundings)  layer"]
    lines += (
        f"{row.step:4d}  {row.micro:5d}  {row.rank:4d}  {row.num_flipped:7d}  "
        f"{row.num_tokens:9d}  {row.greatest_flipped:27.4g}  {_layer(row)}"
        for row in flipped[:_MOST_ROWS]
    )
    if len(flipped) > _MOST_ROWS:
        lines.append(f"… and {len(flipped) - _MOST_ROWS} more")
    return [*lines, ""]


def _layer(row: Row) -> str:
    name = row.layer.partition("/")[2] or row.layer
    call = f" call {row.call}" if row.call else ""
    return f"{name}{call}{' (repeated pass)' if row.is_recompute else ''}"


def _histogram(margins: Sequence[MarginBin]) -> list[str]:
    greatest = max((each.num_tokens for each in margins), default=0)
    lines = [f"{'margin of the choice':24}  {'tokens':>9}  {'flipped':>8}  rounding may explain it"]
    for each in margins:
        bar = "#" * -(-each.num_tokens * _WIDTH // max(1, greatest))
        answer = "yes" if each.is_numeric else "no"
        lines.append(
            f"{bin_label(each):24}  {each.num_tokens:9d}  {each.num_flipped:8d}  {answer:3}  {bar}"
        )
    return [line.rstrip() for line in lines]


# ---


def report_of(
    result: Result, num_ranks: int, command: tuple[str, ...], folder: Path, started: float
) -> Report:
    """Let the checks judge the difference."""
    world = RankSet(range(num_ranks))
    checks = [check() for check in load_checks().values() if RoutingDifference in check.views]
    engine = Engine(checks, world)
    if result.difference is not None:
        engine.feed(result.difference)
    own = own_report(folder, RUNS[0])
    return Report(
        complete=True,
        run=Run(
            id=folder.name,
            command=command,
            world_size=num_ranks,
            ranks=own.run.ranks if own is not None else (),
            torch=own.run.torch if own is not None else "",
            started=_rfc3339(started),
            ended=_rfc3339(time.time()),
            outcome=Outcome.FINISHED,
            active_modes=("moe-determinism",),
        ),
        findings=engine.findings,
        checked=engine.checked,
        not_checked={},
    )


def write_tables(path: Path, result: Result) -> None:
    """Keep all choices, flips and margins as JSON; an infinite margin is null."""
    plain: dict[str, Any] = {
        "choices": msgspec.to_builtins(result.rows),
        "flips": msgspec.to_builtins(result.flips),
        "margins": msgspec.to_builtins(result.margins),
        "cause": msgspec.to_builtins(result.cause),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plain), indent=1))


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
