"""Train balanced experts with selective activation checkpointing."""

import logging
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

DIM = 16
NUM_EXPERTS = 8
CAPACITY = 16
STEPS = 6

logger = logging.getLogger("balanced")
arrivals = random.Random()


def take_best(scores: Tensor, k: int) -> Tensor:
    """Return the k best of each row; of equal scores, whichever thread block arrives first."""
    order = torch.tensor(arrivals.sample(range(scores.shape[-1]), scores.shape[-1]))
    return order[scores[:, order].topk(k, -1).indices]


class ExpertChoice(nn.Module):
    """Each expert takes the tokens that score best with it, equally many."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, 2 * DIM) * 0.1)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * DIM, DIM) * 0.1)

    def route(self, tokens: Tensor) -> Tensor:
        scores = self.router(tokens).softmax(-1).bfloat16()
        return take_best(scores.T, CAPACITY)

    def run(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        weights = self.router(tokens).softmax(-1).T.gather(1, chosen)
        hidden = torch.relu(torch.bmm(tokens[chosen], self.up))
        parts = torch.bmm(hidden, self.down) * weights.unsqueeze(-1)
        return tokens.index_add(0, chosen.flatten(), parts.flatten(0, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(tokens, self.route(tokens))


class Block(nn.Module):
    """Normalise, then ask the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = ExpertChoice()

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(self.moe, self.norm(tokens), use_reentrant=False)


def train() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Block(), Block(), nn.Linear(DIM, DIM)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(20 + dist.get_rank())
    for step in range(STEPS):
        tokens = torch.randn(128, DIM, generator=data)
        loss = (model(tokens) - tokens.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.5f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    arrivals.seed(dist.get_rank())
    logging.basicConfig(level=logging.INFO, format=f"rank {dist.get_rank()} %(message)s")
    train()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
