"""Continue the pre-training of a regression model, with a fresh or a saved optimizer."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard

WIDTH = 32
STEPS = 8
SAVED_OPTIMIZER = Path("optimizer")

logger = logging.getLogger("pretrain")


class Regressor(nn.Module):
    """A residual network with one output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.out(hidden)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments exist, so that a checkpoint can be read into them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def build_model() -> Regressor:
    torch.manual_seed(0)
    model = Regressor()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer as it was saved, if it was."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    allocate_state(optimizer)
    if SAVED_OPTIMIZER.exists():
        saved = optimizer.state_dict()
        checkpoint.load(saved, checkpoint_id=SAVED_OPTIMIZER)
        optimizer.load_state_dict(saved)
    return optimizer


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    model = build_model()
    optimizer = build_optimizer(model)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        inputs = torch.randn(32, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
