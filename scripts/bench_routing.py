#!/usr/bin/env python
"""What observing routing, losses, gradients and sequences costs, on two ranks (CPU, gloo).

Measured are, in a transformer with 16 experts in each layer, the probe ``routing`` beside the rest
of the profile ``light``, and the four probes that look into steps (``routing``, ``losses``,
``gradient-sums``, ``sequence``) beside the rest of ``standard``; the latter also in a transformer
without experts. Last, all probes of ``standard`` are measured together. Blocks of steps with and
without them take turns in the same processes; each block begins with fresh probes and a new model,
so that its first steps are looked at. What a run of 200 steps costs follows from what the steps
cost that are looked at, and the others.
Run it on a quiet machine: ``python scripts/bench_routing.py [--pairs N] [--case NAME…]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from distdiag.config import Config
from distdiag.probes.base import Probe
from distdiag.probes.catalogue import PROBES, Wiring
from distdiag.probes.models.own_steps import EVERY
from distdiag.probes.routing.probe import FIRST_STEPS, FIRST_STEPS_IN_LIGHT
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signals
from distdiag.record.status_page import StatusPage

DIM, HEADS, EXPERTS, LAYERS, WORDS = 256, 4, 16, 4, 1000
ROWS, LENGTH = 2, 128
STEPS: Final = 12
"""So many steps has a block."""
RUN: Final = 200

LOOKING: Final = frozenset({"routing", "losses", "gradient-sums", "sequence"})


class Case(NamedTuple):
    """What is measured."""

    profile: str
    has_experts: bool
    probes: frozenset[str] = frozenset()
    """Those that are measured; all if none is named."""


CASES: Final = {
    "light-moe": Case("light", True, frozenset({"routing"})),
    "standard-moe": Case("standard", True, LOOKING),
    "standard-dense": Case("standard", False, LOOKING),
    "standard-moe, all probes": Case("standard", True),
}


# The model


class Experts(nn.Module):
    """Sends each token to two of the experts."""

    def __init__(self) -> None:
        """Make the gate and the experts."""
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        """Add up what the experts make of their tokens."""
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(tokens[row]) * weights[row, place].unsqueeze(-1))
        return out.view_as(hidden)


def feed_forward() -> nn.Sequential:
    """Return what works on each token alone."""
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class Layer(nn.Module):
    """Attention, and experts or one feed-forward part."""

    def __init__(self, has_experts: bool) -> None:
        """Make the parts."""
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.heads, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = Experts() if has_experts else feed_forward()

    def forward(self, hidden: Tensor) -> Tensor:
        """Add both to what goes by."""
        parts = self.heads(self.before(hidden)).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.between(hidden))


class Training:
    """A model on this rank, and its steps."""

    def __init__(self, has_experts: bool) -> None:
        """Make the same model on all ranks."""
        torch.manual_seed(0)
        layers = [Layer(has_experts) for _ in range(LAYERS)]
        model = nn.Sequential(nn.Embedding(WORDS, DIM), *layers, nn.Linear(DIM, WORDS))
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.num_steps = 0

    def step(self) -> tuple[float, float]:
        """Return how many seconds of wall clock and of processors a step takes."""
        torch.manual_seed(2 * self.num_steps + dist.get_rank())
        self.num_steps += 1
        tokens = torch.randint(WORDS, (ROWS, LENGTH + 1))
        started, busy = time.perf_counter(), processor_seconds()
        words = self.model(tokens[:, :-1])
        cross_entropy(words.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started, processor_seconds() - busy


def processor_seconds() -> float:
    """Return what all threads of this process have used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# On each rank


def observe(folder: Path, case: Case, is_measured: bool) -> list[Probe]:
    """Install the probes of the profile, with those that are measured or without them."""
    rank = dist.get_rank()
    page = StatusPage(folder / f"rank-{rank}.status")
    recorder = Recorder(folder, rank, page, main_script=__file__)
    config = Config(profile="light" if case.profile == "light" else "standard")
    wiring = Wiring(recorder, Signals(), config)
    made = [
        probe
        for spec in PROBES
        if sys.modules.keys() >= set(spec.needs)
        for probe in spec.make(wiring)
    ]
    for probe in made:
        probe.off = not is_measured and (not case.probes or probe.name in case.probes)
    probes = [probe for probe in made if not probe.off]
    missing = case.probes - {probe.name for probe in probes}
    assert not missing or not is_measured, missing
    for probe in probes:
        probe.install()
    return probes


def block(case: Case, is_measured: bool) -> list[tuple[float, float]]:
    """Return how long each step of a new model took."""
    with tempfile.TemporaryDirectory() as folder:
        probes = observe(Path(folder), case, is_measured)
        training = Training(case.has_experts)
        gc.collect()
        dist.barrier()
        took = [training.step() for _ in range(STEPS)]
        for probe in reversed(probes):
            assert not probe.off, probe.name
            probe.uninstall()
    return took


def work(out: Path, case: Case, num_pairs: int) -> None:
    """Train on this rank, and let rank 0 write down how long it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    block(case, is_measured=False)
    pairs = []
    for number in range(num_pairs):
        order = (False, True) if number % 2 else (True, False)
        took = {is_measured: block(case, is_measured) for is_measured in order}
        pairs.append([took[False], took[True]])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, pairs)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(every))
    dist.destroy_process_group()


# In all


def run(name: str, num_pairs: int) -> Any:  # noqa: ANN401
    """Return, for each rank, pair, side and step, the seconds of wall clock and of processors."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", __file__, "--worker", str(out)),
            *("--case", name, "--pairs", str(num_pairs)),
        ]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
        return json.loads(out.read_text())


def added(every: Any, steps: range, place: int) -> float:  # noqa: ANN401
    """Return the median of what these steps take more with the probes, the ranks taken together."""
    pairs = range(len(every[0]))
    mean = [
        [
            [statistics.fmean(rank[pair][side][step][place] for rank in every) for step in steps]
            for side in range(2)
        ]
        for pair in pairs
    ]
    return statistics.median(
        b - a for plain, seen in mean for a, b in zip(plain, seen, strict=True)
    )


def compare(name: str, num_pairs: int) -> None:
    """Show what the probes add to steps, and to a run."""
    every, case = run(name, num_pairs), CASES[name]
    num_first = FIRST_STEPS_IN_LIGHT if case.profile == "light" else FIRST_STEPS
    num_later = len(range(EVERY, RUN, EVERY))
    for place, what in enumerate(("wall clock", "processor time")):
        usual = statistics.median(
            step[place] for rank in every for plain, _ in rank for step in plain[num_first:]
        )
        first = [added(every, range(step, step + 1), place) for step in range(num_first)]
        rest = added(every, range(num_first, STEPS), place)
        looked_at = sum(first) + num_later * first[1]
        in_all = looked_at + (RUN - num_first - num_later) * rest
        cells = [
            *(name, what, f"{usual * 1e3:.0f} ms"),
            ", ".join(f"{each / usual:+.1%}" for each in first),
            f"{rest / usual:+.2%}",
            f"{looked_at / (RUN * usual):+.2%}",
            f"{in_all / (RUN * usual):+.2%}",
        ]
        say(f"| {' | '.join(cells)} |")


def say(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, or be one of the ranks that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--case", choices=CASES, nargs="*", default=[*CASES])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, CASES[options.case[0]], options.pairs)
        return
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    say(f"python {' '.join(sys.argv)}")
    say(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}")
    say(f"{options.pairs} pairs of {STEPS} steps for each row; a run has {RUN} steps")
    say("| case | measured | step | added to the first steps | to others | run, looked at | run |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    for name in options.case:
        compare(name, options.pairs)


if __name__ == "__main__":
    main()
