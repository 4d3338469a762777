"""Fine-tune a sharded language model whose weights rank 0 alone reads."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB = 64
SEQ_LEN = 16
DIM = 32
BATCH = 8
STEPS = 8

logger = logging.getLogger("sft")


class RotaryEmbedding(nn.Module):
    """Rotate pairs of channels by an angle that grows with the position."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 100 ** (torch.arange(0, DIM, 2) / DIM)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

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
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.rotary)
        return self.head(hidden)


def load_pretrained() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def build_model(rank: int) -> LanguageModel:
    """Read the weights on rank 0, shard the model, and spread the weights from there."""
    if rank == 0:
        model = load_pretrained()
    else:
        with torch.device("meta"):
            model = LanguageModel()
    weights = model.state_dict() if rank == 0 else {}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to("meta")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for name, buffer in model.named_buffers():
        if rank == 0:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)
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
    model = build_model(rank)
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
