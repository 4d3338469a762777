"""Train on local data and validate on a shard that lies in a mounted bucket."""

import io
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MOUNT, REPLICA = Path("mount"), Path("replica")

logger = logging.getLogger("validation")


def shard_name(rank: int) -> str:
    return f"validation-{rank}.pt"


def set_up_storage(rank: int) -> None:
    """Make the mount; that of the second machine has stopped to answer (a pipe without writer)."""
    for folder in (MOUNT, REPLICA):
        folder.mkdir(exist_ok=True)
        path = folder / shard_name(rank)
        if rank == 1 and folder == MOUNT:
            os.mkfifo(path)
        else:
            torch.save(torch.randn(32, 16), path)


def read_shard(name: str) -> bytes:
    return (MOUNT / name).read_bytes()


@torch.no_grad()
def validate(model: nn.Module, rank: int) -> float:
    features = torch.load(io.BytesIO(read_shard(shard_name(rank))))
    total = model(features).square().mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)
    set_up_storage(rank)

    torch.manual_seed(0)
    net = nn.Linear(16, 4)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(2):
        for _ in range(8):
            loss = model(torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logger.info("rank %d epoch %d validation %.4f", rank, epoch, validate(net, rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
