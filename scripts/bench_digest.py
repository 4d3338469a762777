#!/usr/bin/env python
"""What reading the contents of tensors costs, side by side with copying the same bytes.

On a CUDA device also what it does to a training step: steps with and without it take turns, as they
would in a run (the digest beside the backward pass, the optimizer after its guard). Run it on a
quiet machine: ``python scripts/bench_digest.py --device cuda --bytes 8e9``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from distdiag.probes.tensors.content import contents

QUEUED = 5
WIDTH = 8192
LAYERS = 12
BATCH = 8192

Work = Callable[[], object]


def say(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def make_tensors(device: str, num_bytes: float, number: int) -> list[torch.Tensor]:
    """Return bf16 tensors of so many bytes in all."""
    size = max(1, int(num_bytes) // number // 2)
    return [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(number)]


def seconds(work: Work, device: str) -> float:
    """Return how long work takes, what it leaves to the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def bench_reading(device: str, num_bytes: float, number: int, rounds: int) -> None:
    """Time a copy and the digests in turns."""
    tensors = make_tensors(device, num_bytes, number)
    target = torch.empty_like(tensors[0])  # one for all, so that twice the memory is not needed
    total = sum(tensor.nbytes for tensor in tensors)

    def copy() -> None:
        for tensor in tensors:
            target.copy_(tensor)

    def digest() -> None:
        contents(tensors).wait()

    def digest_queued() -> None:
        # As in a run: the host goes on, and the device has the next piece of work already.
        pending = [contents(tensors) for _ in range(QUEUED)]
        for each in pending:
            each.guard()

    say(f"first use of the digest {seconds(digest, device):.2f} s (a GPU's kernels are compiled)")
    seconds(copy, device)
    copies, digests, hosts = [], [], []
    for _ in range(rounds):
        copies.append(seconds(copy, device))
        digests.append(seconds(digest, device))
        started = time.perf_counter()
        pending = contents(tensors)
        hosts.append(time.perf_counter() - started)
        pending.wait()
    copied, digested = statistics.median(copies), statistics.median(digests)
    say(f"{number} tensors of bf16, {total / 1e9:.2f} GB, {rounds} rounds")
    say(f"copy    {copied * 1e3:9.2f} ms   {2 * total / copied / 1e9:8.1f} GB/s read and written")
    say(f"digest  {digested * 1e3:9.2f} ms   {total / digested / 1e9:8.1f} GB/s read")
    say(f"time    digest / copy {digested / copied:.2f}")
    if device == "cuda":
        queued = statistics.median(seconds(digest_queued, device) for _ in range(rounds)) / QUEUED
        say(f"queued  {queued * 1e3:9.2f} ms   {total / queued / 1e9:8.1f} GB/s read")
        say(f"traffic queued digest / copy {copied / queued / 2:.1%}")
    say(f"traffic digest / copy {copied / digested / 2:.1%}")
    say(f"host    {statistics.median(hosts) * 1e3:9.2f} ms in the calling thread")


def make_step(weights: list[torch.nn.Parameter], is_observed: list[bool]) -> Work:
    """Return a training step of residual blocks, whose weights are digested in a flagged step."""
    optimizer = torch.optim.SGD(weights, lr=1e-6)
    data = torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        pending = contents(weights) if is_observed[0] else None
        hidden = data
        for weight in weights:
            hidden = hidden + torch.nn.functional.gelu(hidden @ weight)
            hidden = torch.nn.functional.layer_norm(hidden, (WIDTH,))
        hidden.float().pow(2).mean().backward()
        if pending is not None:
            pending.guard()
        optimizer.step()
        optimizer.zero_grad()
        if pending is not None:
            pending.wait()  # whoever takes the time waits here too

    return step


def bench_step(rounds: int) -> None:
    """Time a training step with and without the digest of its weights, in turns."""
    weights = [
        torch.nn.Parameter(0.01 * torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16))
        for _ in range(LAYERS)
    ]
    is_observed = [False]
    step = make_step(weights, is_observed)
    for observed in (False, True) * 3:
        is_observed[0] = observed
        step()
    without, added = [], []
    for turn in range(rounds):
        times = {}
        for observed in (False, True) if turn % 2 else (True, False):
            is_observed[0] = observed
            times[observed] = seconds(step, "cuda")
        without.append(times[False])
        added.append(times[True] / times[False] - 1)
    low, middle, high = statistics.quantiles(added, n=4)
    size = sum(weight.nbytes for weight in weights) / 1e9
    say(
        f"step    {statistics.median(without) * 1e3:.1f} ms without, digest of {size:.2f} GB "
        f"adds {middle:+.2%} (quartiles {low:+.2%} to {high:+.2%}, {rounds} pairs)"
    )


def main() -> None:
    """Run what the device can run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    name = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    say(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads")
    bench_reading(arguments.device, arguments.bytes, arguments.tensors, arguments.rounds)
    if arguments.device == "cuda":
        bench_step(max(4, arguments.rounds))


if __name__ == "__main__":
    main()
