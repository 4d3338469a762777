#!/usr/bin/env python
"""Measure how soon a fault is reported: ``scripts/bench_latency.py [--runs 20] [--hang-runs 5]``.

Each run is a real ``torchrun`` job of two ranks. Prints a table for docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from distdiag.events.collectives import Collective
from distdiag.findings.finding import Report
from distdiag.findings.report_json import decode_report
from distdiag.record.event_reader import EventReader
from distdiag.record.run_dir import RunDir
from distdiag.record.wire import EventDecoder, Interner

PROGRAM = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(20):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.05)
if sys.argv[1] == "contradiction":
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)
    time.sleep(1)
elif sys.argv[1] == "unlike":
    dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0)
elif rank == 0:
    dist.all_reduce(torch.ones(4))
else:
    time.sleep(3600)
dist.destroy_process_group()
"""
THRESHOLD_S = 3.0
MARK = "DISTDIAG_BENCH_MARK"
CONTRADICTION = "from the contradicting record to the line on the terminal"
MISSING = f"from the threshold ({THRESHOLD_S:g} s) to the line about a missing rank"
GONE = "from that line to the end of the whole job (--on-hang abort)"
UNLIKE_GONE = "from calls that cannot end to the end of the whole job (--on-hang abort)"
COMPLETE = "from that line to the complete report"


class Job:
    """One launch of the program, whose lines on the terminal are timed."""

    def __init__(self, folder: Path, fault: str, *options: str) -> None:
        self.run_dir = RunDir(folder / "run", 0)
        script = folder / "program.py"
        script.write_text(PROGRAM)
        self._mark = str(folder)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", "-m", "distdiag.check"),
                *("--run-dir", str(self.run_dir.root), *options, str(script), fault),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def time_of_first_finding(self) -> int:
        """Read the terminal until the first finding; return the monotonic time in nanoseconds."""
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            if line.startswith(("distdiag: error", "distdiag: warning")):
                return time.monotonic_ns()
            lines.append(line)
        raise RuntimeError(f"the job ended and nothing was found:\n{''.join(lines)}")

    def end(self) -> None:
        """Read the rest of the terminal, which ends when nobody holds it open."""
        assert self._process.stderr is not None
        self._process.stderr.read()
        self._process.wait()

    def living(self) -> list[psutil.Process]:
        """Return the processes of the job, by what they inherited."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def calls(self, rank: int) -> Iterator[Collective]:
        """Yield the collectives that a rank recorded."""
        decoder = EventDecoder(rank, Interner())
        for payload in EventReader(self.run_dir.folder, rank).payloads():
            event = decoder.decode(payload)
            if isinstance(event, Collective) and event.signature.op in ("all_reduce", "broadcast"):
                yield event

    def report(self) -> Report:
        """Read report.json."""
        return decode_report(self.run_dir.report.read_bytes())


def measure_contradiction() -> dict[str, float]:
    """Let two ranks contradict each other."""
    with tempfile.TemporaryDirectory(prefix="distdiag-bench-") as folder:
        job = Job(Path(folder), "contradiction")
        reported_ns = job.time_of_first_finding()
        job.end()
        made_ns = max(list(job.calls(rank))[-1].time_ns for rank in (0, 1))
        return {CONTRADICTION: (reported_ns - made_ns) / 1e9}


def measure_unlike_calls() -> dict[str, float]:
    """Let two ranks call operations that wait for one another for ever."""
    with tempfile.TemporaryDirectory(prefix="distdiag-bench-") as folder:
        job = Job(Path(folder), "unlike", "--on-hang", "abort")
        job.time_of_first_finding()
        while job.living():
            time.sleep(0.01)
        gone_ns = time.monotonic_ns()
        job.end()
        made_ns = max(list(job.calls(rank))[-1].time_ns for rank in (0, 1))
        return {UNLIKE_GONE: (gone_ns - made_ns) / 1e9}


def measure_missing_rank() -> dict[str, float]:
    """Let one rank stay away from a collective."""
    with tempfile.TemporaryDirectory(prefix="distdiag-bench-") as folder:
        job = Job(
            Path(folder), "missing", "--hang-timeout", f"{THRESHOLD_S:g}", "--on-hang", "abort"
        )
        reported_ns = job.time_of_first_finding()
        while not job.report().complete:
            time.sleep(0.01)
        complete_ns = time.monotonic_ns()
        while job.living():
            time.sleep(0.01)
        gone_ns = time.monotonic_ns()
        job.end()
        stalled_ns = max(call.time_ns for rank in (0, 1) for call in job.calls(rank))
        return {
            MISSING: (reported_ns - stalled_ns) / 1e9 - THRESHOLD_S,
            COMPLETE: (complete_ns - reported_ns) / 1e9,
            GONE: (gone_ns - reported_ns) / 1e9,
        }


def main() -> None:
    """Run the jobs one after the other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs with a contradiction")
    parser.add_argument("--hang-runs", type=int, default=5, help="runs of each hang")
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = {}
    plan = [measure_contradiction] * arguments.runs
    plan += [measure_unlike_calls, measure_missing_rank] * arguments.hang_runs
    for number, measure in enumerate(plan, start=1):
        for name, seconds in measure().items():
            figures.setdefault(name, []).append(seconds)
        print(f"run {number} of {len(plan)}", file=sys.stderr, flush=True)
    print("| latency | runs | median | maximum |\n|---|---|---|---|")
    for name, seconds in figures.items():
        middle, most = statistics.median(seconds), max(seconds)
        print(f"| {name} | {len(seconds)} | {middle:.2f} s | {most:.2f} s |")


if __name__ == "__main__":
    main()
