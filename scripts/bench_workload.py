#!/usr/bin/env python
"""The training that `bench_overhead.py` times, on every rank: started by it under torchrun."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    parser.add_argument("--kind", choices=sorted(STEPS), required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
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
