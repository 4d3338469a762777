"""Rank 0 hands a file to the others, over an NCCL collective that they take for a barrier."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def wait(kind: str, ready: torch.Tensor) -> None:
    """Let the host wait for the device in one way of many, or not at all."""
    match kind:
        case "item":
            ready.item()
        case "print":
            print(ready, flush=True)
        case "mask":  # its result has as many elements as there are ones
            ready.repeat(4)[torch.ones(4, device=ready.device) > 0]
        case "synchronize":
            torch.cuda.synchronize()
        case "barrier":
            dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", default="none")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    path = options.folder / "shared.txt"
    ready = torch.ones(1, device=device)
    dist.all_reduce(ready)  # the communicator is there
    for number in range(3):
        torch.cuda.synchronize()
        if rank == 0:
            time.sleep(0.5)  # it takes a while to make it
            path.write_text(f"{number}\n" * 1000)
        dist.all_reduce(ready)
        wait(options.wait, ready)
        if rank == 1 and (number or options.wait != "none"):
            path.read_text()
        dist.barrier()
    print("read", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
