"""A training loop in which one rank meets a fault: ``faulty.py FAULT RANK [FOLDER]``."""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

FAULT_STEP = 4
LAST_STEP = 8


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def abort():
    ctypes.CDLL(None).abort()


def hold_the_gil():
    ctypes.PyDLL(None).sleep(3600)


def stay_away():
    while True:
        time.sleep(0.1)


def compute_for_long():
    end = time.monotonic() + 18
    while time.monotonic() < end:
        sum(range(10_000))


def raise_error():
    raise ValueError("a batch without samples")


def leave_quickly():
    os._exit(7)


def kill_the_monitor():
    with open(os.path.join(sys.argv[3], "attempt-0", "monitor.pid")) as file:
        os.kill(int(file.read()), signal.SIGKILL)


def fill_the_disk():
    with open(os.path.join(sys.argv[3], "filler"), "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def main():
    fault, faulty_rank = globals()[sys.argv[1]], int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    for step in range(LAST_STEP):
        if step == FAULT_STEP and dist.get_rank() == faulty_rank:
            fault()
        model(torch.full((4, 8), float(step))).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        # The monitor is given a moment to follow, as a training step of a real model does.
        time.sleep(0.1)
    print(f"rank {dist.get_rank()}: gradient {model.weight.grad.sum().item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
