"""Train one head per task; the gradients of a head are reduced in the group of its task."""

import logging

import torch
import torch.distributed as dist
from torch import nn

TASKS = ("click", "purchase")
NUM_STEPS = 8
BATCH_SIZE = 16

logger = logging.getLogger("multitask")


def make_batch(step: int, rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return the samples of a step by task, in the order in which the log has them."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    # The log of the second region starts with a purchase now and then.
    order = reversed(TASKS) if rank == 1 and step == 5 else TASKS
    return [
        (task, torch.randn(BATCH_SIZE, 12, generator=generator), torch.rand(BATCH_SIZE, 1))
        for task in order
    ]


class Trainer:
    """Holds a head for each task, and a group so that the tasks can be reduced independently."""

    def __init__(self) -> None:
        self.heads = nn.ModuleDict({task: nn.Linear(12, 1) for task in TASKS})
        self.groups = {task: dist.new_group(group_desc=f"{task}_grads") for task in TASKS}
        self.optimizer = torch.optim.SGD(self.heads.parameters(), lr=0.05)

    def reduce_gradients(self, tasks: list[str]) -> None:
        for task in tasks:
            for parameter in self.heads[task].parameters():
                dist.all_reduce(parameter.grad, group=self.groups[task])
                parameter.grad /= dist.get_world_size()

    def step(self, batch: list[tuple[str, torch.Tensor, torch.Tensor]]) -> float:
        self.optimizer.zero_grad()
        losses = {}
        for task, features, target in batch:
            losses[task] = nn.functional.mse_loss(self.heads[task](features), target)
            losses[task].backward()
        self.reduce_gradients(sorted(losses))
        self.optimizer.step()
        return sum(loss.item() for loss in losses.values())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    trainer = Trainer()
    for step in range(NUM_STEPS):
        loss = trainer.step(make_batch(step, rank))
        logger.info("rank %d step %d loss %.4f", rank, step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
