#!/usr/bin/env python
"""What observing the routing of tokens costs a model with 16 experts on two ranks (CPU, gloo).

Runs with and without the probe ``routing`` take turns, once with all other probes of the profile
``light`` and once with those of ``standard``. A run is counted from its first step to its last,
so that the steps that are looked at (the first four and every hundredth) are part of it.
Run it on a quiet machine: ``python scripts/bench_routing.py [--rounds N] [--steps N]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.config import Config
from distdiag.probes.catalogue import PLANS
from distdiag.probes.routing import RoutingWatch
from distdiag.recorder import Recorder
from distdiag.status_page import StatusPage

DIM, EXPERTS, LAYERS, TOKENS = 128, 16, 4, 512
PROFILES: Final = ("light", "standard")

LABELS: Final = {"all": "all steps", "median": "median step", "processor": "processor time"}


class Layer(nn.Module):
    """Sends each token to two of the experts."""

    def __init__(self) -> None:
        """Make the gate and the experts."""
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Add up what the experts make of their tokens."""
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        out = tokens.clone()
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(tokens[row]) * weights[row, place].unsqueeze(-1))
        return out


def work(folder: Path, profile: str, with_routing: bool, num_steps: int) -> None:
    """Train on this rank, and let rank 0 write down how long it took."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    recorder = Recorder(
        folder, rank, StatusPage(folder / f"rank-{rank}.status"), main_script=__file__
    )
    config = Config(profile="light" if profile == "light" else "standard")
    there = [plan for plan in PLANS if sys.modules.keys() >= set(plan.needs)]
    probes = [p for plan in there if plan.name != "routing" for p in plan.make(recorder, config)]
    if with_routing:
        probes.append(RoutingWatch(recorder))
    for probe in probes:
        probe.install()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(Layer() for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds, busy = [], time.process_time()
    for step in range(num_steps):
        torch.manual_seed(2 * step + rank)
        tokens = torch.randn(TOKENS, DIM)
        started = time.perf_counter()
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        found = {
            "all": sum(seconds[1:]),
            "median": statistics.median(seconds),
            "processor": time.process_time() - busy,
        }
        (folder / "seconds.json").write_text(json.dumps(found))
    for probe in reversed(probes):
        probe.uninstall()
    dist.barrier()
    dist.destroy_process_group()


def run(profile: str, with_routing: bool, num_steps: int) -> dict[str, float]:
    """Return how long a run of two ranks took in seconds."""
    with tempfile.TemporaryDirectory() as name:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", __file__, "--worker", name, "--profile", profile),
            *("--steps", str(num_steps), *(["--routing"] if with_routing else [])),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        found: dict[str, float] = json.loads((Path(name) / "seconds.json").read_text())
        return found


def compare(profile: str, rounds: int, num_steps: int) -> None:
    """Show how much longer runs take with the probe, pair by pair."""
    ratios: dict[str, list[float]] = {"all": [], "median": [], "processor": []}
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        took = {with_routing: run(profile, with_routing, num_steps) for with_routing in order}
        for what, each in ratios.items():
            each.append(took[True][what] / took[False][what] - 1)
    for what, each in ratios.items():
        middle, least, most = statistics.median(each), min(each), max(each)
        label = LABELS[what]
        sys.stdout.write(
            f"{profile}, {label}: {middle:+.2%} (from {least:+.2%} to {most:+.2%}, "
            f"{rounds} pairs of {num_steps} steps)\n"
        )
        sys.stdout.flush()


def main() -> None:
    """Measure, or be one of the ranks that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", choices=PROFILES)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--routing", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.profile, options.routing, options.steps)
        return
    for profile in [options.profile] if options.profile else PROFILES:
        compare(profile, options.rounds, options.steps)


if __name__ == "__main__":
    main()
