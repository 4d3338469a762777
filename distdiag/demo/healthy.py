"""Train a small model on every rank; the ranks agree on when to stop.

    torchrun --nproc-per-node 2 -m distdiag.check healthy.py

Read it beside ``sick.py``: they differ in how ``should_stop`` decides.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS = 60
PATIENCE = 3


def make_shard(rank: int, size: int, *, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's own part of the data: noisy samples of one linear function."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(size, 8, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True)
    return inputs, targets + noise * torch.randn(size, 1, generator=generator)


class EarlyStopping:
    """Stop when the validation loss has not improved for ``patience`` epochs."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best = float("inf")
        self.bad_epochs = 0

    def should_stop(self, local_loss: torch.Tensor) -> bool:
        """Decide from the mean over all ranks, so that every rank decides the same."""
        loss = local_loss.clone()
        dist.all_reduce(loss)
        mean_loss = loss.item() / dist.get_world_size()
        self.bad_epochs = 0 if mean_loss < self.best else self.bad_epochs + 1
        self.best = min(self.best, mean_loss)
        return self.bad_epochs >= self.patience


def main() -> None:
    """Train, stop early, and let rank 0 report once everyone has arrived."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_inputs, train_targets = make_shard(rank, 256, noise=0.1)
    valid_inputs, valid_targets = make_shard(100 + rank, 64, noise=0.1)
    stopping = EarlyStopping(PATIENCE)

    for epoch in range(EPOCHS):
        for inputs, targets in zip(train_inputs.split(64), train_targets.split(64), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            valid_loss = nn.functional.mse_loss(model.module(valid_inputs), valid_targets)
        if stopping.should_stop(valid_loss):
            # One write for the whole line, or the lines of two ranks run into each other.
            print(f"rank {rank}: stopped after epoch {epoch}\n", end="", flush=True)
            break

    dist.barrier()
    if rank == 0:
        print("every rank has arrived, rank 0 may save the model", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
