"""A training loop of two ranks that goes well or meets a fault: ``runs.py KIND FOLDER``."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

NUM_BATCHES = 6


def main():
    kind, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    is_uneven = kind in ("uneven", "waiting", "given up")
    for step in range(NUM_BATCHES - (rank if is_uneven else 0)):
        if kind == "raised" and (rank, step) == (1, 3):
            raise ValueError("a batch without samples")
        if kind == "killed" and (rank, step) == (1, 3):
            wait_until_watched(os.path.join(folder, "run", "attempt-0", "monitor.journal"))
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.full((4, 8), float(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    if kind == "waiting" and rank == 1:
        wait_for_a_file(os.path.join(folder, "never"))
    if kind == "given up" and rank == 1:
        wait_for_the_second_look(os.path.join(folder, "run", "report.json"))
    if kind == "race":
        share_a_file(rank, os.path.join(folder, "vocabulary"))
    dist.barrier()
    dist.destroy_process_group()


def wait_for_a_file(path):
    while not os.path.exists(path):
        time.sleep(0.1)


def wait_until_watched(journal):
    """Wait for the monitor: of a death that comes before it nobody sees the signal."""
    wait_for_a_file(journal)
    before = os.path.getsize(journal)
    while os.path.getsize(journal) == before:
        time.sleep(0.1)


def wait_for_the_second_look(report):
    """Give up when the report says which functions of C the ranks hang in."""
    text = ""
    while "native frames: " not in text:
        time.sleep(2)  # who reads much is at work, and does not hang
        with open(report) as file:
            text = file.read()
    raise TimeoutError("no more patience")


def share_a_file(rank, path):
    if rank == 0:
        with open(path, "w") as file:
            file.write("a b c")
    else:
        time.sleep(0.3)
        with open(path) as file:
            file.read()


if __name__ == "__main__":
    main()
