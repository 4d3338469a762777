"""Evaluate experts that are spread over ranks, without dropping tokens."""

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

DIM = 16
NUM_BATCHES = 4

logger = logging.getLogger("experts")


class ExpertLayer(nn.Module):
    """One expert on each rank; every expert gets the same number of rows from each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = dist.get_world_size()
        self.gate = nn.Linear(DIM, self.num_experts, bias=False)
        self.expert = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def capacity(self, chosen: Tensor) -> int:
        """Return how many rows each expert must take so that no token is dropped."""
        counts = torch.bincount(chosen, minlength=self.num_experts)
        most = counts.max()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def forward(self, tokens: Tensor) -> Tensor:
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        capacity = self.capacity(chosen)
        slots = tokens.new_zeros(self.num_experts, capacity, DIM)
        places = torch.zeros_like(chosen)
        for index in range(self.num_experts):
            rows = torch.where(chosen == index)[0]
            slots[index, : len(rows)] = tokens[rows]
            places[rows] = torch.arange(len(rows))
        received = torch.empty_like(slots)
        dist.all_to_all_single(received, slots)
        processed = self.expert(received)
        returned = torch.empty_like(processed)
        dist.all_to_all_single(returned, processed)
        return returned[chosen, places] * weight.unsqueeze(-1)


@torch.no_grad()
def evaluate() -> float:
    torch.manual_seed(0)
    layer = ExpertLayer().eval()
    data = torch.Generator().manual_seed(40 + dist.get_rank())
    total = torch.zeros(())
    for number in range(NUM_BATCHES):
        tokens = torch.randn(48, DIM, generator=data)
        total += (layer(tokens) - tokens).square().mean()
        logger.info("batch %d done", number)
    dist.all_reduce(total)
    return total.item() / NUM_BATCHES / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format=f"rank {dist.get_rank()} %(message)s")
    logger.info("error %.4f", evaluate())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
