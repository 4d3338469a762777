"""Starts its own ranks with multiprocessing, without a launcher."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2


def train(rank: int, meeting_point: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD_SIZE
    )
    total = torch.tensor([rank + 1.0])
    for _ in range(5):
        dist.all_reduce(total)
    if rank == 0:
        print("total", total.item())
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(str(Path(folder, "meet")),), nprocs=WORLD_SIZE)
    print("all ranks have finished")
