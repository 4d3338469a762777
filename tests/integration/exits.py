"""A training loop that ends in one of several ways: ``exits.py KIND``."""

import os
import signal
import sys
import time
from datetime import timedelta

KIND = sys.argv[1]
RANK = int(os.environ["RANK"])
STEP = 4


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no message")


def end_the_job():
    if RANK == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


def raise_everywhere():
    raise ValueError(f"no batch for rank {RANK}")


def leave():
    if RANK == 1:
        sys.exit(3)


def leave_quickly():
    if RANK == 1:
        os._exit(4)


def raise_unspeakable():
    if RANK == 1:
        raise Unspeakable


def leave_early():
    if RANK == 1:
        sys.exit("no data")
    time.sleep(60)  # as long as some imports take


def lose_the_way():
    if RANK == 1:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = "9"


def main():
    if KIND == "leave_early":
        leave_early()
    import torch
    import torch.distributed as dist

    # Rank 0 serves the store of the job no longer than it waits for the others.
    patience = timedelta(seconds=3 if RANK == 1 else 60)
    if KIND == "lose_the_way":
        lose_the_way()
    dist.init_process_group("gloo", timeout=patience)
    weight = torch.ones(4)
    for step in range(8):
        if step == STEP:
            globals()[KIND]()
        dist.all_reduce(weight)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
