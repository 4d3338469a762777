"""Train a decoder with rotary positions in an engine that keeps float32 master weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 64
DIM = 64
HEADS = 2
LENGTH = 512
BATCH = 2
STEPS = 6
LEARNING_RATE = 1e-3


class Rotary(nn.Module):
    """Turn pairs of features by an angle that grows with the position."""

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.register_buffer("inv_freq", 500000.0**-exponents, persistent=False)

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq.float())
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def turned(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


class Decoder(nn.Module):
    """One layer of causal attention between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rotary = Rotary()
        self.project = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        shape = (*tokens.shape, 3, HEADS, DIM // HEADS)
        queries, keys, values = self.project(hidden).view(shape).permute(2, 0, 3, 1, 4)
        cosine, sine = (each.to(hidden.dtype) for each in self.rotary(tokens.shape[1]))
        mixed = nn.functional.scaled_dot_product_attention(
            turned(queries, cosine, sine), turned(keys, cosine, sine), values, is_causal=True
        )
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(hidden)


class Engine:
    """Computes in bfloat16, and lets the optimizer change float32 copies of the weights."""

    def __init__(self, module: nn.Module) -> None:
        self.masters = [each.detach().clone() for each in module.parameters()]
        module.bfloat16()
        self.module = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE)

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        params = list(self.module.parameters())
        for master, param in zip(self.masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, params, strict=True):
                param.copy_(master)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)


def train(rank: int) -> None:
    torch.manual_seed(0)
    engine = Engine(Decoder())
    for step in range(STEPS):
        tokens = batch(rank, step)
        logits = engine.module(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        engine.step(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")


def main() -> None:
    dist.init_process_group("gloo")
    train(dist.get_rank())
    if dist.get_rank() == 0:
        print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
