#!/usr/bin/env python
"""A training on two GPUs that hangs in one of five ways: started by `bench_nccl_hangs.py`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

NUM_STEPS = 6
BAD_STEP = 4


def mark(folder: Path) -> None:
    """Leave the time at which this rank is about to hang."""
    (folder / f"mark-{dist.get_rank()}").touch()


def skipped_collective(rank: int, total: torch.Tensor) -> None:
    """Rank 1 leaves one all_reduce out and comes to the next call."""
    if rank == 0:
        dist.all_reduce(total)
    gathered = total.new_empty(2)
    dist.all_gather_into_tensor(gathered, total)
    gathered.sum().item()


def other_kind(rank: int, total: torch.Tensor) -> None:
    """One rank reduces while the other broadcasts."""
    if rank == 0:
        dist.all_reduce(total)
    else:
        dist.broadcast(total, src=0)
    total.item()


def opposite_groups(rank: int, total: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
    """Two groups are used in opposite order, each call waited for."""
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(total, group=group)
        total.item()


def full_queue(rank: int, total: torch.Tensor) -> None:
    """Rank 0 reads a number behind 200 kernels behind a collective that rank 1 never makes."""
    if rank == 1:
        threading.Event().wait()
    dist.all_reduce(total)
    matrix = torch.ones(256, 256, device=total.device)
    for _ in range(200):
        matrix = matrix @ matrix
    (matrix.sum() + total).item()


def free_memory(rank: int, total: torch.Tensor) -> None:
    """Rank 0 frees memory behind a collective that rank 1 never makes."""
    if rank == 1:
        threading.Event().wait()
    unused = torch.empty(1 << 28, device=total.device)
    dist.all_reduce(total)
    del unused
    torch.cuda.empty_cache()


def main() -> None:
    """Train some steps, then hang as asked."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("data", "model")]
    total = torch.ones(1, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    for step in range(NUM_STEPS):
        dist.all_reduce(total)
        total.item()
        if step != BAD_STEP:
            continue
        mark(folder)
        match kind:
            case "skipped-collective":
                skipped_collective(rank, total)
            case "other-kind":
                other_kind(rank, total)
            case "opposite-groups":
                opposite_groups(rank, total, groups)
            case "full-queue":
                full_queue(rank, total)
            case "free-memory":
                free_memory(rank, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
