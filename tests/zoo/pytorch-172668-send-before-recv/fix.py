"""Train four stages on two ranks, each of which holds every second stage."""

import logging

import torch
import torch.distributed as dist
from torch import nn

NUM_STAGES, WIDTH = 4, 16
NUM_MICROBATCHES = 4

logger = logging.getLogger("pipeline")


class Pipeline:
    """Passes activations from stage to stage; stage s lives on rank s modulo the ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        own = range(rank, NUM_STAGES, world_size)
        self.stages = {stage: nn.Linear(WIDTH, WIDTH) for stage in own}

    def exchange(self, outgoing: torch.Tensor, peer: int) -> torch.Tensor:
        """Give the peer its input and take our own."""
        incoming = torch.empty_like(outgoing)
        if self.rank < peer:
            dist.send(outgoing, peer)
            dist.recv(incoming, peer)
        else:
            dist.recv(incoming, peer)
            dist.send(outgoing, peer)
        return incoming

    @torch.no_grad()
    def fill(self, inputs: torch.Tensor) -> torch.Tensor:
        """Bring the first microbatch through the first half of the stages."""
        peer = 1 - self.rank
        if self.rank == 0:
            dist.send(self.stages[0](inputs).relu(), peer)
            return self.stages[0](inputs).relu()
        received = torch.empty_like(inputs)
        dist.recv(received, peer)
        return self.stages[1](received).relu()

    @torch.no_grad()
    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        activation = self.fill(inputs[0])
        for stage in list(self.stages)[1:]:
            for _ in range(NUM_MICROBATCHES):
                activation = self.exchange(activation, 1 - self.rank)
                activation = self.stages[stage](activation).relu()
        return activation


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(rank)
    pipeline = Pipeline(rank, world_size)
    for step in range(4):
        total = pipeline.run(torch.randn(NUM_MICROBATCHES, 8, WIDTH)).sum()
        logger.info("rank %d step %d sum %.4f", rank, step, total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
