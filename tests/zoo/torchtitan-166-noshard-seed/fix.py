"""Pre-train a small language model, not sharded since it fits on each device."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 64
SEQ_LEN = 16
DIM = 32
BATCH = 8
STEPS = 8
SEED = 7

logger = logging.getLogger("pretrain")


class Block(nn.Module):
    """Mix each token with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * DIM)
        self.mix = nn.Linear(2 * DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat([hidden, torch.roll(hidden, 1, dims=1)], dim=-1)
        return hidden + torch.relu(self.mix(self.norm(pairs)))


class LanguageModel(nn.Module):
    """Embed the tokens, mix them, predict the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def read_shard(rank: int) -> TensorDataset:
    """Return the sequences of this rank: counting upwards with a random stride."""
    generator = torch.Generator().manual_seed(100 + rank)
    start = torch.randint(VOCAB, (BATCH * STEPS, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH * STEPS, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(SEQ_LEN + 1)) % VOCAB)


def build_model() -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        LanguageModel(),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def train(rank: int) -> None:
    torch.manual_seed(SEED)
    model = build_model()
    torch.manual_seed(SEED + rank)  # each rank shuffles its own shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (tokens,) in enumerate(DataLoader(read_shard(rank), BATCH, shuffle=True)):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        logger.info("step %d loss %.4f", step, loss.item() / dist.get_world_size())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    train(rank)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
