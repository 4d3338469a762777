"""Train a regression whose targets have outliers, with the gradients kept below a norm."""

import logging
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

FEATURES = 12
HIDDEN = 24
STEPS = 10
MAX_NORM = 0.5

logger = logging.getLogger("regression")


class Regressor(nn.Module):
    """Two layers, and a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(torch.relu(self.hidden(rows)))).squeeze(-1)


def clip_grad_norm(params: Iterable[nn.Parameter]) -> torch.Tensor:
    """Bound the norm of all gradients, and return what it was."""
    params = [param for param in params if param.grad is not None]
    grads = [param.grad for param in params]
    norm = get_total_norm(grads)
    clip_grads_with_norm_(grads, MAX_NORM, norm)
    return norm


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    model = DistributedDataParallel(Regressor())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(40 + dist.get_rank())
    for step in range(STEPS):
        rows = torch.randn(32, FEATURES, generator=generator)
        targets = rows.sum(dim=-1) + 20 * (rows[:, 0] > 1.5)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows), targets)
        loss.backward()
        norm = clip_grad_norm(model.parameters())
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d loss %.4f norm %.4f", step, loss.item(), norm)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
