#!/usr/bin/env python
"""What observation costs, always measured in turns with the same work unobserved.

Parts: ``call`` (one collective on a backend that does nothing, a deep stack), ``training`` (two
ranks: an MLP with many tiny collectives, a transformer of four layers; and both with
TORCH_DISTRIBUTED_DEBUG=DETAIL), ``host`` (the processor time of single steps of narrow models in
one process, plain and in each profile: what a GPU's host has to do beside), ``start`` (from the
shell to the end of a script that does nothing). Run it on a quiet machine:
``python scripts/bench_overhead.py [PART…]``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distdiag.config import Config
from distdiag.probes.base import Probe
from distdiag.probes.catalogue import PROBES, Wiring
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signals
from distdiag.record.status_page import StatusPage

WORKLOAD = Path(__file__).with_name("bench_workload.py")
OBSERVED = ("process-groups", "collectives", "steps")
STEPS = {"tiny-collectives": 20, "transformer": 4}
BOOTSTRAPS = 2000
NUM_FRAMES = 30
FRAMES_ABOVE = 9
"""The frames of this script and of torch above a collective count, too."""


def say(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# One collective


def install(folder: Path) -> list[Probe]:
    """Install the probes of an observed run, writing into this folder."""
    recorder = Recorder(folder, 0, StatusPage(folder / "rank-0.status"), main_script=__file__)
    wiring = Wiring(recorder, Signals(), Config())
    probes = [probe for spec in PROBES if spec.name in OBSERVED for probe in spec.make(wiring)]
    for probe in probes:
        probe.install()
    return probes


def at_depth(depth: int, action: Callable[[], float]) -> float:
    """Run the action below this many frames."""
    return action() if depth <= 0 else at_depth(depth - 1, action)


def time_one(collective: Callable[[], object], repeats: int) -> float:
    """Return the processor time of one call in microseconds (others may use the machine too)."""
    started = time.thread_time()
    for _ in range(repeats):
        collective()
    return (time.thread_time() - started) / repeats * 1e6


def measure_call(
    collective: Callable[[], object],
    rounds: int,
    observe: Callable[[Path], list[Probe]],
) -> str:
    """Return the medians without and with observation, and that of the differences."""
    repeats = 2000
    depth = NUM_FRAMES - FRAMES_ABOVE
    without, observed = [], []
    for _ in range(rounds):
        without.append(at_depth(depth, lambda: time_one(collective, repeats)))
        with tempfile.TemporaryDirectory() as folder:
            probes = observe(Path(folder))
            at_depth(depth, lambda: time_one(collective, 50))
            observed.append(at_depth(depth, lambda: time_one(collective, repeats)))
            for probe in reversed(probes):
                probe.uninstall()
    added = [b - a for a, b in zip(without, observed, strict=True)]
    return (
        f"without {statistics.median(without):6.1f} µs   with {statistics.median(observed):6.1f} µs"
        f"   added {statistics.median(added):6.1f} µs"
    )


def empty_kernel(folder: Path) -> list[Probe]:
    """Put a kernel that does nothing where the tap has its own: the floor of what it can cost."""
    operation = torch.ops.c10d.allreduce_.default
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = operation._handle.redispatch_boxed

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return redispatch(keyset & after, *args, **kwargs)

    class EmptyKernel(Probe):
        name = "empty-kernel"

        def _install(self) -> None:
            self.library = torch.library.Library("c10d", "IMPL")
            self.library.impl("allreduce_", kernel, "BackendSelect", with_keyset=True)

        def uninstall(self) -> None:
            self.library._destroy()

    probe = EmptyKernel(Recorder(folder, 0, StatusPage(folder / "rank-0.status")))
    probe.install()
    return [probe]


def bench_call(rounds: int) -> None:
    """Time the collectives that training is made of, at a stack of 30 frames."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor, gathered = torch.ones(4), torch.ones(8)
    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(gathered, tensor),
    }
    say(f"call      {'empty kernel':24} {measure_call(kinds['all_reduce'], rounds, empty_kernel)}")
    for name, collective in kinds.items():
        say(f"call      {name:24} {measure_call(collective, rounds, install)}")
    dist.destroy_process_group()


# Training


def run_workload(kind: str, pairs: int, *, checked: bool, detail: bool = False) -> dict[str, list]:
    """Run the workload on two ranks and return its times."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        tool = ["-m", "distdiag.check", "--run-dir", f"{folder}/run", "--report", "json"]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", *(tool if checked else ()), str(WORKLOAD)),
            *("--kind", kind, "--pairs", str(pairs), "--steps", str(STEPS[kind])),
            *("--out", str(out)),
        ]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        if detail:
            environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        subprocess.run(command, env=environment, check=not detail, capture_output=True)
        return json.loads(out.read_text()) if out.exists() else {"without": [], "with": []}


def upper_bound(ratios: Sequence[float]) -> float:
    """Return the upper end of the 95 % interval of the mean, by resampling."""
    generator = random.Random(0)
    means = sorted(
        statistics.fmean(generator.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS)
    )
    return means[int(0.975 * BOOTSTRAPS)]


def bench_training(rounds: int) -> None:
    """Time steps with and without the probes in turn, and in runs of their own with DETAIL."""
    for kind in STEPS:
        times = run_workload(kind, rounds, checked=True)
        ratios = [b / a for a, b in zip(times["without"], times["with"], strict=True)]
        without, observed = (statistics.median(times[name]) for name in ("without", "with"))
        say(
            f"training  {kind:24} without {without:8.2f} ms   with {observed:8.2f} ms   "
            f"mean {statistics.fmean(ratios) - 1:+.1%}, at most {upper_bound(ratios) - 1:+.1%} "
            f"(95 %, {len(ratios)} pairs)"
        )
        plain = run_workload(kind, max(3, rounds // 3), checked=False)["without"]
        detail = run_workload(kind, max(3, rounds // 3), checked=False, detail=True)["without"]
        if not detail:
            say(f"training  {kind:24} DETAIL did not run to the end")
            continue
        by_detail = statistics.median(detail) - statistics.median(plain)
        say(
            f"training  {kind:24} DETAIL adds {by_detail:8.2f} ms to {statistics.median(plain):.2f}"
            f" ms, observation {observed - without:.2f} ms: "
            f"{(observed - without) / by_detail:.0%} of it"
        )


# The host's time of single steps

HOST_KINDS = ("ddp", "fsdp2", "compiled-ddp", "many-collectives")
PROFILES = ("plain", "light", "standard", "deep")
HOST_FIRST, HOST_STEPS = 66, 200
"""The first steps are looked at closely, the others show the usual ones with the looks between."""
HOST_ROUNDS = 5


def run_host(kind: str, profile: str) -> dict[str, list[float]]:
    """Run one process and return the times of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        tool = ["-m", "distdiag.check", "--profile", profile, "--report", "json"]
        tool += ["--run-dir", f"{folder}/run"]
        command = [
            *(sys.executable, *(() if profile == "plain" else tool), str(WORKLOAD)),
            *("--kind", kind, "--steps", str(HOST_STEPS)),
            *("--host", str(HOST_FIRST), "--out", str(out)),
        ]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return json.loads(out.read_text())


def bench_host(rounds: int) -> None:
    """Time steps in each profile, in turns; the lowest and highest round are shown, too."""
    for kind in HOST_KINDS:
        found: dict[str, list[dict[str, list[float]]]] = {profile: [] for profile in PROFILES}
        for number in range(min(rounds, HOST_ROUNDS)):
            for profile in PROFILES if number % 2 == 0 else reversed(PROFILES):
                found[profile].append(run_host(kind, profile))
        usual = [statistics.median(each["main thread"]) for each in found["plain"]]
        for profile in PROFILES:
            say(f"host      {kind:16} {profile:8} {_host_row(found[profile], usual)}")


def _host_row(runs: list[dict[str, list[float]]], plain: list[float]) -> str:
    medians = [statistics.median(each["main thread"]) for each in runs]
    added = [(a - b) * 1e3 for a, b in zip(medians, plain, strict=True)]
    mean = statistics.median(statistics.fmean(each["main thread"]) for each in runs)
    others = (
        statistics.median(statistics.median(each[name]) for each in runs)
        for name in ("all threads", "wall")
    )
    first = statistics.median(each["first"][0] for each in runs)
    return (
        f"main thread {statistics.median(medians):7.3f} ms (mean {mean:7.3f}), added "
        f"{statistics.median(added):6.0f} µs [{min(added):.0f}, {max(added):.0f}]   "
        "all threads {:7.3f} ms   wall {:7.3f} ms".format(*others)
        + f"   first {HOST_FIRST} steps {first:6.0f} ms"
    )


# The start


def time_start(folder: str, *prefix: str) -> float:
    """Return the duration in seconds of a script that only imports torch."""
    script = Path(folder, "script.py")
    script.write_text("import torch.distributed\n")
    started = time.perf_counter()
    subprocess.run([sys.executable, *prefix, str(script)], check=True, capture_output=True)
    return time.perf_counter() - started


def bench_start(rounds: int) -> None:
    """Time a script that does nothing, from its start to its end with the report written."""
    added = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            plain = time_start(folder)
            tool = ("-m", "distdiag.check", "--run-dir", f"{folder}/{number}", "--report", "json")
            added.append(time_start(folder, *tool) - plain)
    say(f"start     {'import torch, end':24} added median {statistics.median(added):.2f} s")


PARTS = {
    "call": bench_call,
    "training": bench_training,
    "host": bench_host,
    "start": bench_start,
}


def main() -> None:
    """Run the parts that are asked for, all if none is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    say(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    for name in arguments.parts or PARTS:
        PARTS[name](arguments.rounds)


if __name__ == "__main__":
    main()
