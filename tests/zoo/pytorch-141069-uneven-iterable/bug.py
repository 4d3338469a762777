"""Train on sharded files through an iterable dataset, with an epoch metric over all ranks."""

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

SAMPLES_PER_SHARD = 48
NUM_SHARDS = 5
BATCH_SIZE = 16
EPOCHS = 2

logger = logging.getLogger("stream")


class ShardedStream(IterableDataset):
    """Yield the samples of every shard that belongs to this rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.shards = list(range(NUM_SHARDS))[rank::world_size]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for shard in self.shards:
            generator = torch.Generator().manual_seed(shard)
            for _ in range(SAMPLES_PER_SHARD):
                features = torch.randn(20, generator=generator)
                yield features, features[:3].sum().unsqueeze(0)


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """Train on what the loader gives; return the summed loss and the number of batches."""
    stats = torch.zeros(2)
    for features, targets in loader:
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stats += torch.tensor([loss.item(), 1.0])
    return stats


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(ShardedStream(rank, world_size), batch_size=BATCH_SIZE)

    for epoch in range(EPOCHS):
        stats = train_epoch(model, loader, optimizer)
        dist.all_reduce(stats)
        mean_loss = (stats[0] / stats[1]).item()
        logger.info("epoch %d batches %d loss %.4f", epoch, int(stats[1]), mean_loss)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
