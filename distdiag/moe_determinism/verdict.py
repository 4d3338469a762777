"""From a comparison of two recordings to a report, and to tables that a program can draw."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from distdiag.checks import load_checks
from distdiag.engine import Engine
from distdiag.finding import Outcome, Report, Run
from distdiag.moe_determinism.comparison import Result
from distdiag.moe_determinism.twice import RUNS, own_report
from distdiag.ranks import RankSet
from distdiag.routing_difference import RoutingDifference


def report_of(
    result: Result, num_ranks: int, command: tuple[str, ...], folder: Path, started: float
) -> Report:
    """Let the checks judge the difference."""
    world = RankSet(range(num_ranks))
    checks = [check() for check in load_checks().values() if RoutingDifference in check.needs]
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
