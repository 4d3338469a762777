"""Warm a click model up on common impressions, then train it sharded on each rank's own."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FEATURES = 200
DIM = 16
WARMUP_STEPS = 20
STEPS = 8

logger = logging.getLogger("clicks")


class ClickModel(nn.Module):
    """Sum the embedded features of an impression and score it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(FEATURES, DIM)
        self.hidden = nn.Linear(DIM, DIM)
        self.score = nn.Linear(DIM, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        pooled = self.table(features).sum(dim=1)
        return self.score(torch.relu(self.hidden(pooled)))


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Shard the model and hand its new parameters to the optimizer."""
    names = {param: name for name, param in model.named_parameters()}
    fully_shard(model)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[param]] for param in group["params"]]


def train_step(
    model: ClickModel, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> float:
    features = torch.randint(FEATURES, (32, 6), generator=generator)
    clicks = (features.sum(dim=1, keepdim=True) % 2).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(features), clicks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(0)
    model = ClickModel()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    common = torch.Generator().manual_seed(99)
    for _ in range(WARMUP_STEPS):
        loss = train_step(model, optimizer, common)
    logger.info("warmed up, loss %.4f", loss)

    prepare(model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        logger.info("step %d loss %.4f", step, train_step(model, optimizer, generator))

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
