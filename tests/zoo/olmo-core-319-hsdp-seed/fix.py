"""Pre-train a small language model with hybrid sharding: replicas of sharded groups."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB = 64
SEQ_LEN = 16
DIM = 32
BATCH = 8
STEPS = 8
SEED = 1234

logger = logging.getLogger("pretrain")


class Block(nn.Module):
    """A pre-normalised feed-forward block over each token and the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(2 * DIM)
        self.up = nn.Linear(2 * DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat([hidden, torch.roll(hidden, 1, dims=1)], dim=-1)
        return hidden + self.down(nn.functional.silu(self.up(self.norm(pairs))))


class LanguageModel(nn.Module):
    """Embed the tokens, mix them, predict the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.05)


def build_model() -> LanguageModel:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.init_weights()
    return model


def read_batch(rank: int, step: int) -> torch.Tensor:
    """Count upwards from a random token, with a random stride."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(SEQ_LEN + 1)) % VOCAB


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(SEED)

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens = read_batch(rank, step)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f grad norm %.3f", step, loss.item(), grad_norm.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
