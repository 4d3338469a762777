#!/usr/bin/env python
"""What a step of a real training costs under distdiag: plain and observed runs, in turns.

A transformer is trained on all GPUs of this machine, or on two ranks of gloo without one. For each
kind of training and each profile: the median and the mean of the steps after the first ones (the
lowest and the highest round in brackets), and the duration of the first ones, which are looked at
closely. ``python scripts/bench_steps.py --rounds 4 --steps 300 ddp fsdp2``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KINDS = ("ddp", "fsdp2", "compiled-ddp", "many-collectives")
PROFILES = ("plain", "light", "standard")
VOCABULARY = 8192
NUM_FIRST = 66
"""The first steps are looked at closely; of the others those of powers of two and of hundreds."""


class Block(nn.Module):
    """A layer of a transformer: tokens of this width, heads of 64 of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, and go through two linear layers: batch, tokens, width."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 64)).unbind(-3)
        heads = (each.transpose(1, 2) for each in (query, key, value))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.other_norm(x))))


def wrapped(kind: str, width: int, device: torch.device) -> nn.Module:
    """Return twelve layers, wrapped as this kind of training does."""
    layers = [Block(width) for _ in range(12)]
    parts = (nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY, bias=False))
    model: nn.Module = nn.Sequential(*parts).to(device)
    if kind == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        return fully_shard(model)
    if kind == "many-collectives":
        return model
    model = nn.parallel.DistributedDataParallel(model)
    return torch.compile(model) if kind == "compiled-ddp" else model


def train(kind: str, num_steps: int, out: Path) -> None:
    """Train on this rank; the first one writes the seconds of each step down."""
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else "cpu"
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    torch.manual_seed(0)
    width = 64 if not has_gpus or kind == "many-collectives" else 1024
    rows, length = (8, 1024) if has_gpus and kind != "many-collectives" else (2, 16)
    model = wrapped(kind, width, torch.device(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    size = (num_steps * rows * dist.get_world_size(), length + 1)
    data = TensorDataset(torch.randint(0, VOCABULARY, size))
    loader = DataLoader(data, batch_size=rows, sampler=DistributedSampler(data))
    seconds = []
    for (tokens,) in loader:
        started = time.perf_counter()
        batch = tokens.to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=has_gpus and kind != "fsdp2"):
            logits = model(batch[:, :-1]).flatten(0, 1).float()
            loss = functional.cross_entropy(logits, batch[:, 1:].flatten())
        loss.backward()
        if kind == "many-collectives":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if has_gpus:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def run(kind: str, profile: str, num_steps: int) -> list[float]:
    """Train once under torchrun; return the milliseconds of each step."""
    num_ranks = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "steps.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        launcher += [str(num_ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        tool = ["-m", "distdiag.check", "--profile", profile, "--report", "json"]
        tool += ["--run-dir", f"{folder}/run"]
        command = [*launcher, *(tool if profile != "plain" else ()), __file__, kind]
        command += ["--steps", str(num_steps), "--out", str(out)]
        threads = max(1, (os.cpu_count() or 1) // num_ranks // 4)
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return [each * 1e3 for each in json.loads(out.read_text())]


def measure(kind: str, rounds: int, num_steps: int) -> None:
    """Run all profiles in turns and show what each of them adds."""
    found: dict[str, list[list[float]]] = {profile: [] for profile in PROFILES}
    for number in range(rounds):
        for profile in PROFILES if number % 2 == 0 else reversed(PROFILES):
            found[profile].append(run(kind, profile, num_steps))
    usual = [statistics.median(each[NUM_FIRST:]) for each in found["plain"]]
    for profile, runs in found.items():
        medians = [statistics.median(each[NUM_FIRST:]) for each in runs]
        added = [(a / b - 1) * 100 for a, b in zip(medians, usual, strict=True)]
        mean = statistics.median(statistics.fmean(each[NUM_FIRST:]) for each in runs)
        first = statistics.median(sum(each[:NUM_FIRST]) for each in runs) / 1e3
        sys.stdout.write(
            f"{kind:16} {profile:8} median {statistics.median(medians):7.2f} ms "
            f"({statistics.median(added):+.1f} % [{min(added):+.1f}, {max(added):+.1f}])   "
            f"mean {mean:7.2f} ms   first {NUM_FIRST} steps {first:5.1f} s\n"
        )
        sys.stdout.flush()


def main() -> None:
    """Measure the kinds that are asked for, all if none is; with `--out`, be a rank of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out is not None:
        train(arguments.kinds[0], arguments.steps, arguments.out)
        return
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    sys.stdout.write(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {where}\n")
    for kind in arguments.kinds or KINDS:
        measure(kind, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
