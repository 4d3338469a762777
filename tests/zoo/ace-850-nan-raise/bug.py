"""Train a small emulator of the atmosphere on the states that each rank reads."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LATITUDES, LONGITUDES, CHANNELS = 8, 16, 4
STEPS = 8

logger = logging.getLogger("trainer")


def read_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and the ones that follow; a shard may hold a channel that never changes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (2, CHANNELS, LATITUDES, LONGITUDES)
    states = torch.randn(shape, generator=generator)
    if rank == 1 and step == 4:
        states[:, 2] = 0.0
    return states, states.roll(1, dims=-1)


def normalise(states: torch.Tensor) -> torch.Tensor:
    """Scale each channel of a batch to a deviation of one."""
    return (states - states.mean((0, 2, 3), keepdim=True)) / states.std((0, 2, 3), keepdim=True)


class Stepper:
    """Takes training steps and looks at the loss of each."""

    def __init__(self) -> None:
        network = nn.Sequential(
            nn.Conv2d(CHANNELS, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, CHANNELS, 3, padding=1)
        )
        self.module = DistributedDataParallel(network)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-3)

    def train_on_batch(self, states: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        predicted = self.module(normalise(states))
        loss = (predicted - normalise(targets)).square().mean()
        if torch.isnan(loss):
            raise ValueError("Loss is NaN-valued during training.")
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    stepper = Stepper()
    for step in range(STEPS):
        loss = stepper.train_on_batch(*read_batch(rank, step))
        if rank == 0:
            logger.info("step %d: loss %.4f", step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
