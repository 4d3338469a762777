"""Whether the same run routes tokens in the same way again: two runs, and how they compare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from distdiag.checks.moe.routing_differences import bin_label
from distdiag.config.tasks import RoutingTask
from distdiag.events.comparisons import MarginBin
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Report
from distdiag.parity.launcher import RECORDS, Launcher, RunSpec, Script
from distdiag.parity.routing.comparison import Comparison, Result, Row
from distdiag.parity.routing.recordings import Recording

RUNS: Final = ("first", "second")


@dataclass(frozen=True, slots=True)
class Settings:
    """How both runs are made; `seed` seeds them before the script does, None leaves them."""

    num_ranks: int
    num_steps: int
    seed: int | None
    timeout_s: float


def compare_twice(
    folder: Path, script: Script, settings: Settings, say: Callable[[str], None]
) -> tuple[Result, Report | None]:
    """Run the script twice, one run after the other, and compare how they route tokens.

    Returns what differs, and the report of the first run alone if there is one. `say` is called
    with the name of each run.

    Raises:
        UsageError: a run failed or took too long, or the runs cannot be compared.

    """
    launcher = Launcher(folder, script, settings.timeout_s, lambda path, _: Recording(path))
    recorded = []
    for name in RUNS:
        say(name)
        recorded.append(launcher.run(_spec(folder, settings, name), {}))
    first, second = recorded
    problem = next(unmatched(first, second), "")
    result = None if problem else Comparison(first, second).run()
    if result is not None and result.difference is None:
        problem = result.problem
    if problem or result is None:
        raise UsageError(f"the runs cannot be compared: {problem}")
    return result, launcher.report(RUNS[0])


def _spec(folder: Path, settings: Settings, name: str) -> RunSpec:
    task = RoutingTask(
        folder=str(folder / name / RECORDS), num_steps=settings.num_steps, seed=settings.seed
    )
    seed = settings.seed
    # Python takes 32 bits for the order of sets.
    environment = {} if seed is None else {"PYTHONHASHSEED": str(seed % 2**32)}
    label = f"the {name} run"
    return RunSpec(name, label, settings.num_ranks, task, environment=environment)


def unmatched(first: Recording, again: Recording) -> Iterator[str]:
    """Yield why two recordings cannot be compared as wholes."""
    for name, run in (("first", first), ("second", again)):
        if not run.num_choices:
            yield (
                f"no router was seen in the {name} run: no module whose name or parts are those of "
                "a router chose experts by topk, max or argmax in a model that is trained"
            )
            return
    if first.num_steps != again.num_steps:
        yield f"the runs made different numbers of steps: {first.num_steps} and {again.num_steps}"


# The comparison as text and as JSON: choices that differ, and the margins of all tokens.

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
    lines = ["step  micro  rank  flipped  of tokens   largest margin (roundings)  layer"]
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


def write_tables(path: Path, result: Result) -> None:
    """Keep all choices, flips and margins as JSON; an infinite margin is null."""
    plain: dict[str, Any] = {
        "choices": msgspec.to_builtins(result.rows),
        "flips": msgspec.to_builtins(result.flips),
        "margins": msgspec.to_builtins(result.margins),
        "cause": msgspec.to_builtins(result.cause),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plain), indent=1))
