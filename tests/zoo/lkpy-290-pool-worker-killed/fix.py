"""Train a recommender on user histories that a pool of processes turns into features."""

import logging
import multiprocessing
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORKER_LIMIT = 64 << 20
NUM_ITEMS = 256

logger = logging.getLogger("recommender")


def allocate(rows: int) -> torch.Tensor:
    """Allocate a table; the kernel kills a worker that takes more memory than it has."""
    if rows * NUM_ITEMS * 4 > WORKER_LIMIT:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros(rows, NUM_ITEMS)


def featurize(history: list[int]) -> torch.Tensor:
    """Return how often each item occurs in the history of a user."""
    events = history[-1000:]
    table = allocate(len(events))
    table[torch.arange(len(events)), torch.tensor(events)] = 1
    return table.sum(dim=0)


def make_histories(rank: int) -> list[list[int]]:
    lengths = [200, 340, 150, 420, 90, 610]
    if rank == 1:
        lengths[4] = 90_000  # a crawler that nobody filtered
    return [[(7 * n + length) % NUM_ITEMS for n in range(length)] for length in lengths]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    with multiprocessing.get_context("fork").Pool(1) as pool:
        features = pool.map(featurize, make_histories(rank), chunksize=1)
    logger.info("rank %d has %d users", rank, len(features))

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(NUM_ITEMS, 16))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step, row in enumerate(features):
        loss = model(row[None] / row.sum()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
