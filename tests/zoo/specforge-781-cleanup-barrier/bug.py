"""Fine-tune a classifier, and shut down in order whatever happens."""

import logging

import torch
import torch.distributed as dist
from torch import nn

NUM_CLASSES = 4
UNLABELLED = -1

logger = logging.getLogger("finetune")


def make_shard(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    shard = []
    for _ in range(12):
        features = torch.randn(8, 16, generator=generator)
        shard.append((features, torch.randint(NUM_CLASSES, (8,), generator=generator)))
    if rank == 1:
        shard[7][1][3] = UNLABELLED  # one row came without a label
    return shard


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, NUM_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (features, labels) in enumerate(make_shard(rank)):
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())


def shut_down() -> None:
    """Let every rank finish before the group goes."""
    dist.barrier()
    logger.info("rank %d: all ranks are done", dist.get_rank())
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    try:
        train(dist.get_rank())
    finally:
        shut_down()


if __name__ == "__main__":
    main()
