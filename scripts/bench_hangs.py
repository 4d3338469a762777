#!/usr/bin/env python
"""Inject hangs at random and score the verdicts: ``scripts/bench_hangs.py --runs 100 --seed 0``.

Each run is a ``torchrun`` job of 2 to 4 ranks on gloo in which one rank does one thing wrong at one
step. Scored are the rank, the class and the time until the line about it (``bench_hang_trial.py``
says how that is measured). Prints tables for docs/results.md; ``--json FILE`` keeps every run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from bench_hang_trial import Plan, Trial

from distdiag.events.errors import DamagedFileError
from distdiag.findings.finding import Finding, Severity

NOTHING = "nothing"
SAVE_STEPS = (2, 5, 8)

CLASSES = {
    "healthy": {NOTHING},
    "missing rank": {"COL001", "COL002", "COL003", "COL007", "COL009", "COL011"},
    "deadlock": {"COL001", "COL012"},
    "dead rank": {"HNG002"},
    "raised": {"HNG001"},
    "straggler": {"HNG015"},
    "data loader": {"HNG004"},
    "file system": {"HNG005"},
    "gil": {"HNG006"},
    "checkpoint": {"HNG007"},
    "compilation": {"HNG008"},
    "initialisation": {"COL008", "HNG009"},
    "teardown": {"COL002", "HNG010"},
    "lock": {"HNG011"},
    "stopped": {"HNG012"},
    "store wait": {"HNG014"},
}
"""The codes that name each class."""


class Kind(NamedTuple):
    """A kind of fault. With `is_tie`, the records of two ranks do not show which of them is wrong.

    With `has_peer`, the next rank may be named as well: it did not do what this one waits for.
    """

    hang_class: str
    is_tie: bool = False
    has_peer: bool = False


KINDS = {
    "healthy": Kind("healthy"),
    "slow": Kind("healthy"),
    "skip-collective": Kind("missing rank", is_tie=True),
    "skip-step": Kind("missing rank", is_tie=True),
    "early-break": Kind("missing rank", is_tie=True),
    "swallowed": Kind("missing rank", is_tie=True),
    "extra-collective": Kind("missing rank", is_tie=True),
    "guarded-barrier": Kind("missing rank", is_tie=True),
    "left": Kind("missing rank"),
    "group-order": Kind("deadlock", is_tie=True),
    "recv": Kind("deadlock", has_peer=True),
    "killed": Kind("dead rank"),
    "raised": Kind("raised"),
    "worker-killed": Kind("raised"),
    "busy": Kind("straggler"),
    "loader-sleep": Kind("data loader"),
    "loader-pipe": Kind("data loader"),
    "worker-lock": Kind("data loader"),
    "worker-stopped": Kind("data loader"),
    "pipe": Kind("file system"),
    "file-lock": Kind("file system"),
    "gil": Kind("gil"),
    "exit-thread": Kind("teardown"),
    "cleanup-barrier": Kind("missing rank", is_tie=True),
    "init-absent": Kind("initialisation"),
    "own-group": Kind("initialisation", has_peer=True),
    "checkpoint": Kind("checkpoint"),
    "build-lock": Kind("compilation"),
    "store-key": Kind("store wait"),
    "lock": Kind("lock"),
    "queue": Kind("lock"),
    "stopped": Kind("stopped"),
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one run showed. `codes` are those of its findings of warning or above, worst first."""

    plan: Plan
    codes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    message: str = ""
    right_rank: bool = False
    right_class: bool = False
    latency_s: float | None = None
    left_behind: int = 0
    problem: str = ""

    @property
    def hang_class(self) -> str:
        """The class of what was injected."""
        return KINDS[self.plan.kind].hang_class

    @property
    def code(self) -> str:
        """The code that the report names first."""
        return self.codes[0] if self.codes else self.problem.partition(":")[0] or NOTHING


def make_plans(runs: int, seed: int, only: Sequence[str]) -> list[Plan]:
    """Draw the runs: every kind equally often, the rest at random."""
    draw = random.Random(seed)
    names = list(only or KINDS)
    kinds: list[str] = []
    while len(kinds) < runs:
        kinds += draw.sample(names, len(names))
    plans = []
    for kind in kinds[:runs]:
        world_size = draw.randint(2, 4)
        step = draw.choice(SAVE_STEPS) if kind == "checkpoint" else draw.randint(1, 8)
        plans.append(Plan(kind, world_size, draw.randrange(world_size), step))
    return plans


def suspects(plan: Plan) -> set[int]:
    """Return the ranks that may rightly be named."""
    kind = KINDS[plan.kind]
    if kind.has_peer:
        return {plan.rank, (plan.rank + 1) % plan.world_size}
    return {0, 1} if kind.is_tie and plan.world_size == 2 else {plan.rank}


def is_right_rank(plan: Plan, alarms: Sequence[Finding]) -> bool:
    """Say whether the first finding names the rank and nobody else, and no other an innocent."""
    if KINDS[plan.kind].hang_class == "healthy" or not alarms:
        return KINDS[plan.kind].hang_class == "healthy" and not alarms
    may_be = suspects(plan)
    if plan.rank not in alarms[0].ranks and not KINDS[plan.kind].has_peer:
        return False
    return all(finding.ranks and set(finding.ranks) <= may_be for finding in alarms)


def judge(trial: Trial) -> Verdict:
    """Score one run."""
    plan = trial.plan
    problem = "" if trial.ended else "the job did not end"
    try:
        report = trial.report()
    except (OSError, DamagedFileError):
        problem = problem or f"no report: {''.join(trial.lines[-3:])}"
        return Verdict(plan=plan, left_behind=trial.left_behind, problem=problem)
    alarms = [finding for finding in report.findings if finding.severity is not Severity.INFO]
    if KINDS[plan.kind].hang_class == "straggler":
        # A rank that comes in the end is worth a note, and an alarm would be false.
        alarms = alarms or [f for f in report.findings if f.code in CLASSES["straggler"]]
    alarms.sort(key=lambda finding: -finding.severity.weight)
    codes = tuple(finding.code for finding in alarms)
    return Verdict(
        plan=plan,
        codes=codes,
        ranks=tuple(alarms[0].ranks) if alarms else (),
        message=alarms[0].message if alarms else "",
        right_rank=is_right_rank(plan, alarms),
        right_class=(codes[0] if codes else NOTHING) in CLASSES[KINDS[plan.kind].hang_class],
        latency_s=trial.latency_s if alarms else None,
        left_behind=trial.left_behind,
        problem=problem,
    )


def run(plan: Plan) -> Verdict:
    """Make one run and score it."""
    with tempfile.TemporaryDirectory(prefix="distdiag-bench-") as name:
        return judge(Trial(plan, Path(name)))


def confusion(verdicts: Sequence[Verdict]) -> str:
    """Return the table of injected classes and named codes."""
    counts = Counter((verdict.hang_class, verdict.code) for verdict in verdicts)
    codes = sorted({code for _, code in counts})
    lines = [f"| injected | {' | '.join(codes)} |", f"| --- |{' --- |' * len(codes)}"]
    for name in CLASSES:
        row = [counts[name, code] for code in codes]
        if any(row):
            cells = (
                f"**{count}**" if count and code in CLASSES[name] else str(count or "")
                for code, count in zip(codes, row, strict=True)
            )
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the table of scores."""
    hangs = [verdict for verdict in verdicts if verdict.hang_class != "healthy"]
    healthy = [verdict for verdict in verdicts if verdict.hang_class == "healthy"]
    latencies = sorted(v.latency_s for v in hangs if v.latency_s is not None)
    rows = [
        ("right rank", share([verdict.right_rank for verdict in hangs])),
        ("right class", share([verdict.right_class for verdict in hangs])),
        ("false alarms on healthy runs", f"{sum(bool(v.codes) for v in healthy)}/{len(healthy)}"),
        ("runs that did not end or left no report", str(sum(bool(v.problem) for v in verdicts))),
        ("processes left behind", str(sum(verdict.left_behind for verdict in verdicts))),
    ]
    if latencies:
        late = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))]
        rows.append(("declared to line, median", f"{statistics.median(latencies):.2f} s"))
        rows.append(("declared to line, 95th percentile", f"{late:.2f} s"))
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(["| score | value |", "| --- | --- |", *lines])


def share(hits: Sequence[bool]) -> str:
    """Return how many are right."""
    percent = 100 * sum(hits) / len(hits) if hits else 0.0
    return f"{sum(hits)}/{len(hits)} ({percent:.1f} %)"


def line_of(verdict: Verdict) -> str:
    """Return the line about one run."""
    plan = verdict.plan
    marks = ", ".join(
        f"{name} {'ok' if is_right else 'NO'}"
        for name, is_right in (("rank", verdict.right_rank), ("class", verdict.right_class))
    )
    late = "" if verdict.latency_s is None else f", {verdict.latency_s:.2f} s"
    return (
        f"{plan.kind} on rank {plan.rank} of {plan.world_size} at step {plan.step}: "
        f"{' '.join(verdict.codes) or verdict.code} {list(verdict.ranks)} ({marks}{late}) "
        f"{verdict.problem}{verdict.message}"
    )


def main() -> int:
    """Make the runs one after the other and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], choices=sorted(KINDS), metavar="KIND")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs here")
    arguments = parser.parse_args()
    verdicts = []
    plans = make_plans(arguments.runs, arguments.seed, arguments.only)
    for number, plan in enumerate(plans, start=1):
        verdicts.append(run(plan))
        print(f"[{number}/{len(plans)}] {line_of(verdicts[-1])}", file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(verdicts)))
    print(f"{summary(verdicts)}\n\n{confusion(verdicts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
