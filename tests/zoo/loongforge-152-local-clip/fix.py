"""Train a sharded sequence tagger with its own clipping of gradients."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB = 64
DIM = 32
TAGS = 6
STEPS = 10
MAX_NORM = 0.5

logger = logging.getLogger("tagger")


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Tagger(nn.Module):
    """Score the tags of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, TAGS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).flatten(0, 1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    total_norm = torch.nn.utils.get_total_norm(grads).full_tensor()
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for shard in shards:
        shard.mul_(scale)
    return total_norm


def read_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(VOCAB, (8, 16), generator=generator)
    return tokens, tokens % TAGS


def build_model() -> Tagger:
    torch.manual_seed(0)
    model = Tagger()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        tokens, tags = read_batch(rank, step)
        loss = nn.functional.cross_entropy(model(tokens), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        total_norm = clip_gradients(model, MAX_NORM)
        optimizer.step()
        logger.info("step %d loss %.4f gradient norm %.4f", step, loss.item(), total_norm.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
