"""Run the zoo under a tool and score it: `python -m tests.zoo.run --with distdiag`."""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Column, Table

from tests.integration.launch import Launch, Launcher, Outcome
from tests.zoo.expectation import Expectation, ZooEntry, load_entries
from tests.zoo.score import Report, Score, score_bug, score_fix

__all__ = [
    "EntryResult",
    "Result",
    "ScriptResult",
    "combine",
    "main",
    "run_entry_script",
    "score_run",
    "summarise",
]

ScriptName = Literal["bug", "fix"]
Mode = Literal["distdiag", "detail", "plain"]
CHECK_OPTIONS = ("--hang-timeout", "5", "--on-hang", "abort")
LOG_TAIL = 4000
RUNS_OF_PARITY = 4

_NAMED_MISMATCH = re.compile(
    r"Detected mismatch between collectives|failed to pass monitoredBarrier"
)


class ScriptResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one script did under the tool, and how that is judged.

    A script that ran several times is described by its first run that did not pass, if there is
    one.
    """

    outcome: str
    status: int | None
    duration_s: float
    score: Score
    aborted_at_exit: bool
    names_mismatch: bool
    left_behind: tuple[str, ...]
    log_tail: str
    num_runs: int = 1
    num_passed: int = 1

    @property
    def cell(self) -> str:
        """Return the script's cell of the table."""
        mark = "[green]ok[/]" if self.score.passed else "[red]no[/]"
        reported = (
            f" {self.score.code} by {'+'.join(self.score.matched)}" if self.score.matched else ""
        )
        named = ", named by torch" if self.names_mismatch else ""
        share = f" {self.num_passed}/{self.num_runs}" if self.num_runs > 1 else ""
        return f"{mark}{share} {self.outcome}{named}{reported} ({self.duration_s:.0f} s)"


class EntryResult(msgspec.Struct, frozen=True):
    """Both scripts of one entry."""

    id: str
    bug: ScriptResult
    fix: ScriptResult


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The zoo's answer on one tool."""

    tool: Mode
    true_positives: int
    misses: int
    false_alarms: int
    entries: tuple[EntryResult, ...]


def ending(run: Outcome) -> Literal["hung", "finished", "failed"]:
    """Return how a run ended; what gloo does at the interpreter's exit is no failure."""
    if run.exit_status is None:
        return "hung"
    return "finished" if run.exit_status == 0 or run.aborted_at_exit else "failed"


def names_mismatch(run: Outcome) -> bool:
    """Tell whether torch itself named the disagreeing ranks."""
    return bool(_NAMED_MISMATCH.search(run.stdout + run.stderr))


def score_run(entry: ZooEntry, name: ScriptName, mode: Mode, run: Outcome) -> Score:
    """Judge one run of the bug or the fix of an entry."""
    how = ending(run)
    if name == "fix" and how != "finished":
        return Score(False, reason=f"{how} with status {run.exit_status}")
    if run.leftovers:
        return Score(False, reason=f"left behind: {'; '.join(run.leftovers)}")
    if mode == "distdiag":
        report = msgspec.convert(run.report, Report) if run.report is not None else None
        if name == "fix":
            return score_fix(report)
        return score_bug(report, entry.expectation, entry.bug)
    if name == "fix":
        return Score(True)
    if mode == "detail":
        is_named = names_mismatch(run)
        return Score(is_named, reason="" if is_named else "nothing named")
    symptoms = {"hung": "hang", "failed": "fail", "finished": "silent"}
    shown, wanted = symptoms[how], entry.expectation.outcome
    return Score(shown == wanted, reason="" if shown == wanted else f"{shown}, not {wanted}")


def run_entry_script(
    entry: ZooEntry, name: ScriptName, mode: Mode, timeout_s: float, launcher: Launcher
) -> ScriptResult:
    """Run and score the bug or the fix of one entry, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
        script, folder = entry.bug, Path(temporary, "work")
        folder.mkdir()
        if name == "fix":
            script = Path(temporary, "fix.py")
            script.write_text(entry.fixed_text)
        run = _run(
            entry.expectation, script, mode, timeout_s, Launch(launcher=launcher, folder=folder)
        )
    score = score_run(entry, name, mode, run)
    return ScriptResult(
        outcome=ending(run),
        status=run.exit_status,
        duration_s=round(run.duration_s, 1),
        score=score,
        aborted_at_exit=run.aborted_at_exit,
        names_mismatch=names_mismatch(run),
        left_behind=run.leftovers,
        log_tail=(run.stdout + run.stderr)[-LOG_TAIL:],
        num_passed=int(score.passed),
    )


def _run(
    expected: Expectation, script: Path, mode: Mode, timeout_s: float, launch: Launch
) -> Outcome:
    nproc = expected.world_size
    if mode != "distdiag":
        debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if mode == "detail" else {}
        launch = msgspec.structs.replace(launch, environ=debug)
        return launch.plain(script, nproc=nproc, timeout=timeout_s)
    if expected.mode == "parity":
        arguments = [*expected.parity_args, str(script)]
        return launch.parity(arguments, timeout=RUNS_OF_PARITY * timeout_s)
    return launch.checked(script, options=CHECK_OPTIONS, nproc=nproc, timeout=timeout_s)


def combine(results: Sequence[ScriptResult]) -> ScriptResult:
    """Return one result for several runs of a script: all of them must pass."""
    reported = next((result for result in results if not result.score.passed), results[-1])
    return msgspec.structs.replace(
        reported,
        num_runs=sum(result.num_runs for result in results),
        num_passed=sum(result.num_passed for result in results),
    )


def summarise(mode: Mode, entries: list[EntryResult]) -> Result:
    """Count what was found, missed and wrongly accused."""
    hits = sum(entry.bug.score.passed for entry in entries)
    return Result(
        tool=mode,
        true_positives=hits,
        misses=len(entries) - hits,
        false_alarms=sum(not entry.fix.score.passed for entry in entries),
        entries=tuple(entries),
    )


def _table(result: Result) -> Table:
    entry_column = Column("entry", no_wrap=True)
    table = Table(entry_column, "bug.py", "fix.py", "why not", title=f"zoo with {result.tool}")
    for entry in result.entries:
        why = "\n".join(filter(None, [entry.bug.score.reason, entry.fix.score.reason]))
        table.add_row(entry.id, entry.bug.cell, entry.fix.cell, why)
    return table


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.run", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="run these entries")
    parser.add_argument(
        "--with", dest="mode", choices=["distdiag", "detail", "plain"], default="distdiag"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--times", type=_positive, default=1, metavar="N", help="run each so often")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="bound each script")
    parser.add_argument(
        "--launcher", choices=["forked", "torchrun"], default="torchrun", help="start ranks by it"
    )
    args = parser.parse_args(argv)
    if args.timeout is None:
        # Without the tool a hang lasts until the bound; with it, only a slow machine comes near.
        args.timeout = 120.0 if args.mode == "distdiag" else 60.0
    return args


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _run_all(entries: list[ZooEntry], args: argparse.Namespace, console: Console) -> Result:
    results = []
    names: tuple[ScriptName, ScriptName] = ("bug", "fix")
    for number, entry in enumerate(entries, start=1):
        scripts = {}
        for name in names:
            runs: list[ScriptResult] = []
            for _ in range(args.times):
                runs.append(run_entry_script(entry, name, args.mode, args.timeout, args.launcher))
                place = f"\\[{number}/{len(entries)}] {entry.id} {name}.py"
                console.print(f"{place}: {combine(runs).cell}", highlight=False)
            scripts[name] = combine(runs)
        results.append(EntryResult(entry.id, **scripts))
    return summarise(args.mode, results)


def main(argv: list[str] | None = None) -> int:
    """Run the zoo; return 1 when anything was missed or wrongly accused, 2 for wrong usage."""
    args = _parse_args(argv)
    console = Console()
    try:
        entries = load_entries(args.only)
    except ValueError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    for entry in (each for each in entries if each.missing):
        console.print(f"left out {entry.id}: needs {', '.join(entry.missing)}")
    result = _run_all([each for each in entries if not each.missing], args, console)
    console.print(_table(result))
    console.print(
        f"true positives {result.true_positives}, misses {result.misses}, "
        f"false alarms {result.false_alarms}"
    )
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return 1 if result.misses or result.false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
