"""A program that stands still: ``standing.py children|lock|contradiction|late [SECONDS]``."""

import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton


def compute(seconds: float) -> None:
    """Use the processor in a process of its own, as a compiler does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def wait_for_children(rank: int, seconds: float) -> None:
    """Let a worker of rank 1 compute for long."""
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(compute, seconds).result()
    dist.all_reduce(torch.ones(1))


def wait_for_lock(rank: int) -> None:
    """Wait for a build that was killed, before any collective."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, f"lock-{rank}")
        lock.touch()
        FileBaton(str(lock)).wait()


def contradict(rank: int) -> None:
    """Call something else on each rank."""
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


def come_late(rank: int, seconds: float) -> None:
    """Let rank 1 come late to the last collective."""
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1))


def main() -> None:
    what, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    match what:
        case "children":
            wait_for_children(rank, float(rest[0]))
        case "lock":
            wait_for_lock(rank)
        case "contradiction":
            contradict(rank)
        case "late":
            come_late(rank, float(rest[0]))
    print("done", flush=True)


if __name__ == "__main__":
    main()
