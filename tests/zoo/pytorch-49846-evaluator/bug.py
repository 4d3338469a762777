"""Train on all ranks but the last, which evaluates each checkpoint when it appears."""

import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

CHECKPOINT = Path("checkpoint.pt")
NUM_STEPS = 12

logger = logging.getLogger("roles")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(16, 4)


def wait_for_checkpoint() -> dict[str, torch.Tensor]:
    while not CHECKPOINT.exists():
        time.sleep(0.1)
    return torch.load(CHECKPOINT)


def evaluate() -> None:
    model = make_model()
    model.load_state_dict(wait_for_checkpoint())
    with torch.no_grad():
        score = model(torch.ones(4, 16)).square().mean()
    logger.info("evaluator: score %.4f", score.item())


def train(group: dist.ProcessGroup) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
        optimizer.step()
    logger.info("trainer: last loss %.4f", loss.item())
    torch.save(model.state_dict(), CHECKPOINT.with_suffix(".tmp"))
    CHECKPOINT.with_suffix(".tmp").rename(CHECKPOINT)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == world_size - 1:
        evaluate()
        return
    dist.init_process_group("gloo")
    train(dist.new_group(range(world_size - 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
