#!/usr/bin/env python
"""What observing files costs, always measured in turns with the same work unobserved.

Parts: ``call`` (one call of each kind on a local file), ``script`` (a script that opens 10,000
files and works for a millisecond with each), ``collective`` (what a collective pays when no file
was touched, and when a log is open). Run it on a quiet machine:
``python scripts/bench_files.py [PART…]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from distdiag.events.files import FileAction
from distdiag.probes.files.probe import FileProbe
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal
from distdiag.record.status_page import StatusPage

NUM_FILES = 10_000
BATCH = 500
BLOCK = 50
WARM_UP = 50
WORK_S = 1e-3

Work = Callable[[Sequence[str]], None]


def say(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def start(folder: str, before_sync: Signal[[bool]] | None = None) -> FileProbe:
    """Install the probe, writing into a folder."""
    Path(folder, "events").mkdir()
    page = StatusPage(Path(folder, "events", "rank-0.status"))
    before_sync = before_sync or Signal()
    recorder = Recorder(
        Path(folder, "events"), 0, page, main_script=__file__, before_sync=before_sync
    )
    probe = FileProbe(recorder, before_sync)
    probe.install()
    return probe


def open_each(paths: Sequence[str]) -> None:
    """Open every file for reading."""
    for path in paths:
        open(path, "rb").close()


def open_one(paths: Sequence[str]) -> None:
    """Open one file again and again."""
    path = paths[0]
    for _ in paths:
        open(path, "rb").close()


def write_each(paths: Sequence[str]) -> None:
    """Write a little into every file."""
    for path in paths:
        with open(path, "wb") as file:
            file.write(b"text")


def test_each(paths: Sequence[str]) -> None:
    """Ask whether every file exists."""
    for path in paths:
        os.path.exists(path)


def replace_each(paths: Sequence[str]) -> None:
    """Put a new file in the place of every file."""
    for path in paths:
        with open(path + ".new", "wb") as file:
            file.write(b"text")
        os.replace(path + ".new", path)


def open_system(paths: Sequence[str]) -> None:
    """Open files that are not observed."""
    for _ in paths:
        open("/proc/self/stat", "rb").close()


CALLS: dict[str, Work] = {
    "open, other files": open_each,
    "open, the same file": open_one,
    "open, a file of the system": open_system,
    "exists, other files": test_each,
    "write and close": write_each,
    "write, close, replace": replace_each,
}


def make_files(folder: str, number: int) -> list[str]:
    """Create small files."""
    os.makedirs(folder, exist_ok=True)
    paths = [f"{folder}/file-{each}.bin" for each in range(number)]
    write_each(paths)
    return paths


def time_each(work: Work, paths: Sequence[str]) -> float:
    """Return the processor time of one item in microseconds (others may use the machine too)."""
    started = time.thread_time()
    work(paths)
    return (time.thread_time() - started) / len(paths) * 1e6


def bench_call(rounds: int) -> None:
    """Time each kind of call, the turns without and with the probe one after the other."""
    for name, work in CALLS.items():
        without, added = [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                paths = make_files(folder, BATCH)
                warm = make_files(f"{folder}/warm-up", WARM_UP)
                time_each(work, warm + paths)
                bare = time_each(work, paths)
                probe = start(folder)
                time_each(work, warm)
                observed = time_each(work, paths)
                probe.uninstall()
            without.append(bare)
            added.append(observed - bare)
        say(
            f"call    {name:28} without {statistics.median(without):6.1f} µs   added "
            f"{statistics.median(added):5.2f} µs, least disturbed {least(added):5.2f} µs"
        )


def least(added: Sequence[float]) -> float:
    """Return the lower quartile: the turns that nobody else disturbed."""
    return statistics.quantiles(added, n=4)[0] if len(added) > 1 else added[0]


def working(open_file: Callable[..., BinaryIO], rounds: int) -> Work:
    """Return what reads every file and computes."""

    def work(paths: Sequence[str]) -> None:
        for path in paths:
            with open_file(path, "rb") as file:
                file.read()
            for _ in range(rounds):
                sum(range(200))

    return work


def calibrated() -> int:
    """Return how many rounds of computing take about a millisecond."""
    started = time.thread_time()
    for _ in range(1000):
        sum(range(200))
    return max(1, round(WORK_S * 1000 / (time.thread_time() - started)))


def bench_script(rounds: int) -> None:
    """Time a script that opens 10,000 files and works with them, every other block unobserved."""
    bare_open, work_rounds = open, calibrated()
    ratios = []
    for _ in range(max(1, rounds // 10)):
        with tempfile.TemporaryDirectory() as folder:
            paths = make_files(f"{folder}/data", NUM_FILES)
            os.utime(f"{folder}/data", (1, 1))  # it was there before the run
            probe = start(folder)
            for first in range(0, NUM_FILES, BLOCK):
                block = paths[first : first + BLOCK]
                bare = time_each(working(bare_open, work_rounds), block)
                seen = time_each(working(open, work_rounds), block)
                ratios.append(seen / bare - 1)
            probe.uninstall()
    say(
        f"script  {NUM_FILES} files, 1 ms each: mean {statistics.fmean(ratios):+.2%}, median "
        f"{statistics.median(ratios):+.2%}, least disturbed {least(ratios):+.2%} "
        f"({len(ratios)} pairs of blocks of {BLOCK} files)"
    )


def bench_collective(rounds: int) -> None:
    """Time what stands before a collective's record when nothing, or one log, is open."""
    with tempfile.TemporaryDirectory() as folder:
        before_sync: Signal[[bool]] = Signal()
        probe = start(folder, before_sync)
        numbers = []
        with open(f"{folder}/train.log", "a", encoding="utf-8"):
            for _ in range(rounds):
                started = time.thread_time()
                for _ in range(1000):
                    if before_sync.subscribers:
                        before_sync.emit(True)
                numbers.append((time.thread_time() - started) * 1e3)
        probe.uninstall()
    say(f"collective, one log open: added {statistics.median(numbers):.2f} µs")


PARTS = {"call": bench_call, "script": bench_script, "collective": bench_collective}


def main() -> None:
    """Run the parts that are asked for, all if none is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    say(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, {len(FileAction)} actions")
    for name in arguments.parts or PARTS:
        PARTS[name](arguments.rounds)


if __name__ == "__main__":
    main()
