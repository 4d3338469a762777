#!/usr/bin/env python
"""What ``distdiag parity`` costs: its time against that of the plain runs, and the memory of ranks.

In each round the plain runs on one rank and on two are made, and then the comparison of both, all
with the same global batch and number of steps. Time is that from the shell to the end of all
processes, and that of processors is given beside it, which other work on the machine changes less;
memory is the most that any one rank held, by the system's own mark (VmHWM).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil

WORKLOAD = Path(__file__).with_name("bench_parity_workload.py")
SMALL = Path(__file__).parents[1] / "tests" / "parity" / "programs" / "language_model.py"
LAUNCHER = "torch.distributed.run"
POLL_S = 0.1


class Cost(NamedTuple):
    """What one command took: seconds, those of processors, and the most bytes of one rank."""

    seconds: float
    processor: float
    memory: int
    comparing: int = 0


def say(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def is_rank(process: psutil.Process) -> bool:
    """Tell whether a launcher started this process as a rank."""
    parent = process.parent()
    return parent is not None and LAUNCHER in parent.cmdline()


def peak(pid: int) -> int:
    """Return the most memory in bytes that a process has held so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def measure(command: list[str]) -> Cost:
    """Run a command to its end and return what it took."""
    started = time.perf_counter()
    ranks: dict[int, bool] = {}
    processor: dict[int, float] = {}
    most = own = 0
    with tempfile.TemporaryFile() as log:
        process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for each in [process, *process.children(recursive=True)]:
                try:
                    processor[each.pid] = sum(each.cpu_times()[:2])
                    if ranks.setdefault(each.pid, is_rank(each)):
                        most = max(most, peak(each.pid))
                except (psutil.Error, OSError):
                    continue
            try:
                own = max(own, peak(process.pid))
            except OSError:
                continue
            time.sleep(POLL_S)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}:\n{log.read().decode(errors='replace')}")
    return Cost(time.perf_counter() - started, sum(processor.values()), most, own)


def plain(num_ranks: int, script: list[str]) -> Cost:
    """Run the script under torchrun alone."""
    launcher = [sys.executable, "-m", LAUNCHER, "--standalone"]
    return measure([*launcher, "--nproc-per-node", str(num_ranks), *script])


def compared(steps: int, script: list[str]) -> Cost:
    """Compare the script on two ranks with itself on one."""
    with tempfile.TemporaryDirectory(prefix="bench-parity-") as folder:
        command = [sys.executable, "-m", "distdiag.cli", "parity", "--world-sizes", "1,2"]
        command += ["--steps", str(steps), "--run-dir", f"{folder}/run"]
        return measure([*command, *script])


def spread(values: list[float]) -> str:
    """Return the median and the range of some values."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def bench(name: str, rounds: int, steps: int, scripts: tuple[list[str], ...]) -> None:
    """Measure one script, as it runs on one rank, on two, and in the comparison."""
    alone, shared, studied = scripts
    times, processors, memories = [], [], []
    for number in range(rounds):
        one, two, both = plain(1, alone), plain(2, shared), compared(steps, studied)
        times.append(both.seconds / (one.seconds + two.seconds))
        processors.append(both.processor / (one.processor + two.processor))
        memories.append(both.memory / one.memory)
        say(
            f"{name} round {number + 1}: one rank {one.seconds:.1f} s, two {two.seconds:.1f} s, "
            f"parity {both.seconds:.1f} s ({times[-1]:.2f} times, of processors "
            f"{processors[-1]:.2f}); largest rank "
            f"{one.memory / 1e6:.0f} MB plain, {both.memory / 1e6:.0f} MB compared "
            f"({memories[-1]:.2f} times); comparing {both.comparing / 1e6:.0f} MB"
        )
    say(
        f"{name}: time {spread(times)} times, of processors {spread(processors)}, "
        f"memory {spread(memories)} times, {rounds} rounds"
    )


def main() -> None:
    """Measure both scripts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=("large", "small"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args, more = parser.parse_known_args()
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    say(
        f"torch {version('torch')}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{args.device}, OMP_NUM_THREADS {threads}, load {os.getloadavg()[0]:.1f}"
    )
    device = ["--device", args.device]
    if args.only != "small":
        script = [str(WORKLOAD), "--steps", str(args.steps), *device, *more]
        # The comparison ends its runs after the steps, at the batch that follows the last one.
        studied = [*script, "--steps", str(args.steps + 1)]
        bench("large", args.rounds, args.steps, (script, script, studied))
    if args.only != "large":
        # Two ranks take 4 samples of 256 each step, that is 32 steps; one rank takes 8.
        script = [str(SMALL), *device]
        bench("small", args.rounds, 32, ([*script, "--batch-size", "8"], script, script))


if __name__ == "__main__":
    main()
