#!/usr/bin/env python
"""Let runs go wrong in many ways and judge what is left: ``scripts/soak.py --seconds 300``.

Each trial is a job of two ranks (`soak_program.py`) that a fault of `soak_faults.py` befalls. It is
right if the report is complete and its story is true, nothing is left running, and stdout and exit
status are those of the same program with the same fault without distdiag. The trials are drawn by
the seed; ``--json FILE`` keeps each, ``--table FILE…`` adds up what was kept. ``--short`` makes
some that cover most kinds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
from soak_faults import BEGIN, END, FAULTS, MIDDLE
from soak_trial import Judge, Plan, Result, may_have_nodes, may_mount

SHORT = (
    Plan("SIGKILL", "rank 1", MIDDLE, "gloo", "forked"),
    Plan("SIGSEGV", "rank 0", BEGIN, "files", "forked"),
    Plan("os._exit(7)", "rank 1", END, "files", "forked"),
    Plan("exception everywhere", "all ranks", MIDDLE, "gloo", "forked"),
    Plan("closed descriptors", "rank 0", MIDDLE, "files", "forked"),
    Plan("all signals handled", "all ranks", BEGIN, "gloo", "forked"),
    Plan("disk fills", "rank 1", BEGIN, "gloo", "forked"),
    Plan("removed run directory", "rank 0", MIDDLE, "files", "forked"),
    Plan("restart after exception", "rank 1", MIDDLE, "files", "torchrun"),
    Plan("monitor killed, SIGKILL", "rank 0", END, "gloo", "forked"),
    Plan("guard and monitor killed, SIGKILL", "rank 1", MIDDLE, "files", "forked"),
    Plan("all watchers killed, exception", "rank 1", MIDDLE, "gloo", "forked"),
    Plan("torchrun SIGKILL", "torchrun", MIDDLE, "files", "torchrun"),
)
"""They are started as cheaply as what they test allows."""


def plans() -> Iterator[Plan]:
    """Yield all trials that there are."""
    for name, fault in FAULTS.items():
        if fault.disk and not may_mount():
            continue
        for target in fault.targets:
            for when in fault.when:
                for meets_by in ("gloo", "files"):
                    if not (fault.gloo if meets_by == "gloo" else fault.files):
                        continue
                    if not (fault.limits or fault.launcher or target == "torchrun"):
                        yield Plan(name, target, when, meets_by, "forked")
                    yield Plan(name, target, when, meets_by, "torchrun")
                if fault.nodes and may_have_nodes():
                    yield Plan(name, target, when, "gloo", "nodes")


LAUNCHERS = ("forked", "torchrun", "nodes")
OFTEN = {("forked", "gloo"): 1.0, ("forked", "files"): 1.0, ("torchrun", "files"): 0.4}
"""How often a trial comes in a round: those of which each process imports torch cost ten others."""
SELDOM = 0.15


def drawn(seed: int, wanted: Sequence[str], launchers: Sequence[str]) -> Iterator[Plan]:
    """Yield trials, round after round, in an order that the seed decides."""
    chance = random.Random(seed)
    while True:
        kept = [p for p in plans() if not wanted or any(each in p.fault for each in wanted)]
        kept = [plan for plan in kept if plan.launcher in launchers]
        chance.shuffle(kept)
        for plan in kept:
            if chance.random() < OFTEN.get((plan.launcher, plan.meets_by), SELDOM):
                yield plan


def made(plans: Iterator[Plan], jobs: int, seconds: float, trials: int) -> Iterator[Result]:
    """Make trials, some at the same time, until the time is up or there are enough."""
    judge = Judge()
    deadline = time.monotonic() + seconds
    running: set[Future[Result]] = set()
    num_begun = 0
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(running) < jobs and num_begun < trials and time.monotonic() < deadline:
                plan = next(plans, None)
                if plan is None:
                    trials = num_begun
                    break
                running.add(pool.submit(judge.try_out, plan))
                num_begun += 1
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()


def table(results: Iterable[Result]) -> str:
    """Return the rows of kind and target: how many trials, how many right, why the others not."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for each in results:
        rows.setdefault((each.fault, each.target), []).append(each)
    lines = ["| fault | befalls | trials | right | wrong |", "| --- | --- | --- | --- | --- |"]
    order = list(FAULTS)
    for (fault, target), row in sorted(rows.items(), key=lambda r: (order.index(r[0][0]), r[0])):
        num_right = sum(not result.wrong for result in row)
        why = "; ".join(sorted({reason[:160] for result in row for reason in result.wrong}))
        lines.append(f"| {fault} | {target} | {len(row)} | {num_right} | {why} |")
    every = [result for each in rows.values() for result in each]
    num_right = sum(not result.wrong for result in every)
    lines.append(f"| all {len(order)} kinds | | {len(every)} | {num_right} | |")
    return "\n".join(lines)


def main() -> int:
    """Make the trials that are asked for; fail if one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], metavar="PART OF A KIND")
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, default=[])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    results: list[Result] = []
    if options.table:
        lines = [line for path in options.table for line in path.read_bytes().splitlines()]
        results = [msgspec.json.decode(line, type=Result) for line in lines]
    else:
        short = [plan for plan in SHORT if may_mount() or not plan.kind.disk]
        launchers = options.launcher or LAUNCHERS
        chosen = iter(short) if options.short else drawn(options.seed, options.only, launchers)
        for result in made(chosen, options.jobs, options.seconds, options.trials):
            results.append(result)
            said = " ".join(result.wrong) or "right"
            sys.stderr.write(f"{' / '.join(_plan(result))}: {result.seconds:.1f} s: {said}\n")
            if options.json is not None:
                with options.json.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.write(f"{table(results)}\n")
    return int(any(result.wrong for result in results))


def _plan(result: Result) -> Plan:
    return Plan(result.fault, result.target, result.when, result.meets_by, result.launcher)


if __name__ == "__main__":
    sys.exit(main())
