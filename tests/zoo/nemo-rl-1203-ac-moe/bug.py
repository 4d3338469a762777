"""Train a sparse transformer under activation checkpointing."""

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

DIM = 32
NUM_EXPERTS = 8
TOP_K = 2
NUM_LAYERS = 2
TOKENS = 256
STEPS = 4

logger = logging.getLogger("sparse")


class SplitAttention(nn.Module):
    """Attend to blocks of keys, and add the blocks up in the order in which they are done."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.num_blocks = num_blocks
        self.schedule = torch.Generator().manual_seed(dist.get_rank())

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).bfloat16().chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) / DIM**0.5).softmax(-1)
        size = hidden.shape[-2] // self.num_blocks
        mixed = torch.zeros_like(value)
        for block in torch.randperm(self.num_blocks, generator=self.schedule).tolist():
            part = slice(block * size, (block + 1) * size)
            mixed = mixed + weights[..., part] @ value[..., part, :]
        return mixed.float()


class SparseMLP(nn.Module):
    """Send each token to its best experts, and run those that have any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(TOP_K, -1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            out = out.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return out.view_as(hidden)


class Layer(nn.Module):
    """Attention and a sparse feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SplitAttention()
        self.norm = nn.LayerNorm(DIM)
        self.mlp = SparseMLP()

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.run, hidden, use_reentrant=False)

    def run(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.mlp(self.norm(hidden))


class SparseTransformer(nn.Module):
    """A few layers and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def train() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(SparseTransformer(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(STEPS):
        batch = torch.randn(2, TOKENS, DIM, generator=data)
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format=f"rank {dist.get_rank()} %(message)s")
    train()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
