"""Rank 0 waits for a rank that stays away, on GPUs over NCCL or on processors over gloo."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist


def fill(device: torch.device) -> list[torch.Tensor]:
    """Leave no memory of the GPU to anybody else."""
    held = []
    size = torch.cuda.mem_get_info(device)[0]
    while size > 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def stay_away() -> None:
    time.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fill", action="store_true")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    print("sum", total.item(), flush=True)
    held = fill(torch.device(device)) if options.fill else []
    if dist.get_rank() == 1:
        stay_away()
    dist.all_reduce(total)
    print("sum", total.item(), len(held), flush=True)


if __name__ == "__main__":
    main()
