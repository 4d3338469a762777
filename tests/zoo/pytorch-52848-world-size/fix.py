"""Train on the number of machines and processes that the configuration says."""

import dataclasses
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("launch")


@dataclasses.dataclass(frozen=True)
class Config:
    """What the cluster looked like when this was written."""

    num_nodes: int = 1
    gpus_per_node: int = 4
    steps: int = 10
    lr: float = 0.1

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node


def init_distributed(config: Config) -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    return rank


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    config = Config()
    rank = init_distributed(config)
    logger.info("rank %d of %d is ready", rank, dist.get_world_size())

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    for _ in range(config.steps):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logger.info("rank %d last loss %.4f", rank, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
