#!/usr/bin/env python
"""The training that `bench_overhead.py` times, on every rank: started by it under torchrun.

With `--host` it runs as one process, and each step is timed by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from distdiag.agent.agent import RankAgent
from distdiag.config import Config
from distdiag.probes.base import Probe
from distdiag.probes.catalogue import Wiring, find_probes
from distdiag.record.signals import Signals

Step = Callable[[], None]


def tiny_collectives() -> Step:
    """Return a step of an MLP that reduces each of its many small gradients on its own."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(8, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    return step


def transformer() -> Step:
    """Return a step of a transformer of four layers, sharded layer by layer."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(8, 128, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


STEPS = {"tiny-collectives": tiny_collectives, "transformer": transformer}

WIDTH, VOCABULARY = 16, 64


class Block(nn.Module):
    """A layer of a transformer so narrow that what counts is the time of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, and go through two linear layers: batch, tokens, width."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).unbind(-3)
        heads = (each.transpose(1, 2) for each in (query, key, value))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.other_norm(x))))


def narrow(wrapper: str) -> Step:
    """Return a step of twelve narrow layers with the loop around it that trainings have."""
    layers = [Block() for _ in range(12)]
    model: nn.Module = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)
    )
    if wrapper == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:  # a bucket for each layer, as in large models
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    if wrapper == "compiled-ddp":
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = TensorDataset(torch.randint(0, VOCABULARY, (1 << 14, 9)))
    batches = iter(DataLoader(tokens, batch_size=2))

    def step() -> None:
        (batch,) = next(batches)
        logits = model(batch[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits, batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


HOST_STEPS: dict[str, Callable[[], Step]] = {
    "ddp": partial(narrow, "ddp"),
    "fsdp2": partial(narrow, "fsdp2"),
    "compiled-ddp": partial(narrow, "compiled-ddp"),
    "many-collectives": tiny_collectives,
}


def time_host(kind: str, num_first: int, num_steps: int) -> dict[str, list[float]]:
    """Return milliseconds of each step: of the main thread, of all threads, and on the wall.

    Reads of modules are limited as on a GPU, where the first steps are no exception.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    begun = time.thread_time()
    step = HOST_STEPS[kind]()
    _limit_reads_as_on_gpus()
    rows: list[tuple[float, ...]] = []
    for number in range(num_first + num_steps):
        if number == num_first:
            first = time.thread_time() - begun
            gc.collect()
            gc.freeze()
        before = (time.thread_time(), time.process_time(), time.perf_counter())
        step()
        after = (time.thread_time(), time.process_time(), time.perf_counter())
        rows.append(tuple((b - a) * 1e3 for a, b in zip(before, after, strict=True)))
    columns = zip(*rows[num_first:], strict=True)
    named = dict(zip(("main thread", "all threads", "wall"), map(list, columns), strict=True))
    return {**named, "first": [first * 1e3]}


def _limit_reads_as_on_gpus() -> None:
    numerics = sys.modules.get("distdiag.probes.numerics.probe")
    if numerics is not None:
        numerics._FIRST_USUAL, numerics._FIRST_CLOSE = 0, numerics._FIRST_CLOSE_ON_GPU


def time_block(step: Step, num_steps: int) -> float:
    """Return the duration of one step in milliseconds."""
    step()
    gc.collect()  # what installing and removing the probes left must not be paid for by a step
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - started) / num_steps * 1e3


def install(agent: RankAgent) -> list[Probe]:
    """Install fresh probes of all kinds on the recorder of the agent that runs."""
    wiring = Wiring(agent.recorder, Signals(), Config())
    probes = [probe for spec in find_probes() for probe in spec.make(wiring)]
    for probe in probes:
        probe.install()
    return probes


def main() -> None:
    """Time blocks of steps; with `--pairs` the probes are away in one block of two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=sorted({*STEPS, *HOST_STEPS}), required=True)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--host", type=int, metavar="FIRST", help="time single steps after these")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.host is not None:
        found = time_host(arguments.kind, arguments.host, arguments.steps)
        Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")
        return
    dist.init_process_group("gloo")
    step = STEPS[arguments.kind]()
    time_block(step, arguments.steps)
    agent = RankAgent.current
    times: dict[str, list[float]] = {"without": [], "with": []}
    for probe in reversed(agent.probes if agent else []):
        probe.uninstall()
    for _ in range(arguments.pairs):
        times["without"].append(time_block(step, arguments.steps))
        if agent is not None:
            probes = install(agent)
            times["with"].append(time_block(step, arguments.steps))
            for probe in reversed(probes):
                probe.uninstall()
    if dist.get_rank() == 0:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(times, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
