#!/usr/bin/env python
"""What a sample of a model costs in the step that it is taken in, and what each part of it takes.

Models of many small modules, so that hardly anything but the walk over them is measured: plain,
under DDP and under FSDP2, on one rank (CPU, gloo). Blocks of steps with and without snapshots take
turns in one process; each block begins with fresh probes and a new model, so that its first steps
are sampled. The parts are timed while a snapshot is taken; some are parts of others.
Times are of processors. ``python scripts/bench_snapshots.py [--pairs N] [--modules N…]``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distdiag.config import Config
from distdiag.probes.catalogue import PROBES, Wiring
from distdiag.probes.models.own_steps import FIRST_STEPS
from distdiag.probes.models.snapshot import ModelSnapshots
from distdiag.probes.optimizers.steps import BackwardProbe, StepClock
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signals
from distdiag.record.status_page import StatusPage

DIM, ROWS = 8, 2
WRAPPERS: Final = ("plain", "ddp", "fsdp2")

PARTS: Final = (
    ("models.snapshot", "ModelSnapshots._after_backward"),
    ("models.snapshot", "ModelSnapshots._before_step"),
    ("models.snapshot", "ModelSnapshots._after_step"),
    ("models.snapshot", "ModelSnapshots._surroundings"),
    ("models.registry", "LiveModels.roots"),
    ("models.snapshot", "plan_of"),
    ("models.snapshot", "ModelSnapshots._read"),
    ("models.tensor_plans", "sharded_parameters"),
    ("models.tensor_plans", "policies_of"),
    ("models.tensor_plans", "untied_pairs"),
    ("models.attention_heads", "HeadCounts.divided"),
    ("models.optimizer_samples", "OptimizerSamples.begin"),
)
"""Functions, each in the module that calls it or whose class has it."""


class Block(nn.Module):
    """Twelve modules, as in a layer of a transformer."""

    def __init__(self) -> None:
        """Make the parts."""
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in "qkvo"})
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        """Use all of them."""
        seen = self.before(hidden)
        for part in self.attention.values():
            seen = part(seen)
        return hidden + seen + self.mlp(self.between(hidden))


def model_of(num_modules: int, wrapper: str) -> nn.Module:
    """Return a model of so many modules or a few less."""
    torch.manual_seed(0)
    size = len(list(Block().modules()))
    model = nn.Sequential(*(Block() for _ in range((num_modules - 1) // size)))
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (1,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def observation() -> Iterator[None]:
    """Install the snapshots and the probes that tell them of steps."""
    with tempfile.TemporaryDirectory() as folder:
        page = StatusPage(Path(folder, "rank-0.status"))
        recorder = Recorder(Path(folder), 0, page, main_script=__file__)
        wiring = Wiring(recorder, Signals(), Config())
        steps = next(spec for spec in PROBES if spec.name == "steps")
        kinds = (ModelSnapshots, BackwardProbe, StepClock)
        probes = [probe for probe in steps.make(wiring) if isinstance(probe, kinds)]
        for probe in probes:
            probe.install()
        yield
        for probe in reversed(probes):
            assert not probe.is_off, probe.name
            probe.uninstall()


class Parts:
    """What parts of the snapshots have taken since the last question."""

    def __init__(self) -> None:
        """Nothing ran yet."""
        self._took: dict[str, float] = {}

    def watch(self) -> None:
        """Time those parts that there are."""
        for where, path in PARTS:
            holder: Any = importlib.import_module(f"distdiag.probes.{where}")
            *outer, name = path.split(".")
            for each in outer:
                holder = getattr(holder, each)
            if hasattr(holder, name):
                setattr(holder, name, self._timed(path, getattr(holder, name)))

    def _timed(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            started = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.process_time() - started
                self._took[path] = self._took.get(path, 0.0) + took

        return call

    def take(self) -> dict[str, float]:
        """Return the seconds by part."""
        took, self._took = self._took, {}
        return took


def block(num_modules: int, wrapper: str, parts: Parts) -> list[tuple[float, dict[str, float]]]:
    """Return how long the steps of a new model took that would be looked at, without the first."""
    model = model_of(num_modules, wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = torch.ones(ROWS, DIM)
    took = []
    gc.collect()
    for _ in range(FIRST_STEPS):
        parts.take()
        started = time.process_time()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append((time.process_time() - started, parts.take()))
    return took[1:]


def compare(num_modules: int, wrapper: str, num_pairs: int, parts: Parts) -> None:
    """Show what the snapshots add to a step, and what their parts take."""
    plain: list[float] = []
    seen: list[tuple[float, dict[str, float]]] = []
    for number in range(num_pairs):
        for is_observed in (False, True) if number % 2 else (True, False):
            with observation() if is_observed else contextlib.nullcontext():
                took = block(num_modules, wrapper, parts)
            if is_observed:
                seen += took
            else:
                plain += [seconds for seconds, _ in took]
    usual = statistics.median(plain)
    low, added, high = statistics.quantiles([seconds - usual for seconds, _ in seen], n=4)
    say(
        f"{num_modules} modules, {wrapper}: step {usual * 1e3:.1f} ms, the look adds "
        f"{added * 1e3:.1f} ms (quartiles {low * 1e3:.1f} to {high * 1e3:.1f})"
    )
    for _, path in PARTS:
        found = [each.get(path, 0.0) for _, each in seen]
        if any(found):
            say(f"    {path:28}{statistics.median(found) * 1e3:8.2f} ms")


def say(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure all models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--modules", type=int, nargs="*", default=[1000, 5000])
    parser.add_argument("--wrappers", choices=WRAPPERS, nargs="*", default=[*WRAPPERS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    say(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}")
    parts = Parts()
    parts.watch()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        for num_modules in options.modules:
            for wrapper in options.wrappers:
                compare(num_modules, wrapper, options.pairs, parts)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
