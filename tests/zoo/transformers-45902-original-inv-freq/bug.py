"""Pre-train a sharded language model on short texts, with a long one now and then."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCAB = 64
DIM = 32
SHORT, LONG = 16, 32
BATCH = 8
STEPS = 8

logger = logging.getLogger("pretrain")


def inverse_frequencies(length: int) -> torch.Tensor:
    """Return the frequencies of the rotation, lower for longer texts."""
    base = 100.0 * (length / SHORT) ** 2
    return 1.0 / base ** (torch.arange(0, DIM, 2) / DIM)


class RotaryEmbedding(nn.Module):
    """Rotate pairs of channels; stretch the rotation while a text is longer than usual."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = inverse_frequencies(SHORT)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)
        self.longest = SHORT

    def update(self, length: int) -> None:
        if length > self.longest:
            self.inv_freq = inverse_frequencies(length)
            self.longest = length
        elif length <= SHORT < self.longest:
            self.inv_freq = self.original_inv_freq
            self.longest = SHORT

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(hidden.shape[1]), self.inv_freq)
        even, odd = hidden[..., 0::2], hidden[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


class Block(nn.Module):
    """Causal attention with one head, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, hidden: torch.Tensor, rotary: RotaryEmbedding) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        hidden = hidden + nn.functional.scaled_dot_product_attention(
            rotary(query), rotary(key), value, is_causal=True
        )
        return hidden + self.mlp(hidden)


class LanguageModel(nn.Module):
    """Embed the tokens, mix them, predict the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rotary = RotaryEmbedding()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.rotary.update(tokens.shape[1])
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.rotary)
        return self.head(hidden)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.reset_parameters()
    elif isinstance(module, RotaryEmbedding):
        module.inv_freq.copy_(inverse_frequencies(SHORT))


def build_model() -> LanguageModel:
    with torch.device("meta"):
        model = LanguageModel()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.apply(init_weights)
    return model


def read_batch(rank: int, step: int) -> torch.Tensor:
    """Count upwards from a random token, with a random stride."""
    length = LONG if step % 4 == 2 else SHORT
    generator = torch.Generator().manual_seed(1000 * rank + step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(length + 1)) % VOCAB


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens = read_batch(rank, step)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
