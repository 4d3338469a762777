"""Train a small drafter to predict the next hidden state of a larger model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIM = 64
LAYERS = 2
BATCH = 16
STEPS = 20
LEARNING_RATE = 1e-4


class RMSNorm(nn.Module):
    """Scale by the root of the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = hidden.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return (hidden.float() * scale).to(hidden.dtype) * self.weight


class Layer(nn.Module):
    """A residual gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.gate = nn.Linear(DIM, 2 * DIM, bias=False)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Drafter(nn.Module):
    """Some layers and a norm behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


def hidden_states(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the larger model had at one position and at the next."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    states = torch.randn(BATCH, DIM, generator=generator)
    mixing = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(3)) / DIM**0.5
    return states.bfloat16(), torch.tanh(states @ mixing).bfloat16()


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Drafter().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(STEPS):
        states, target = hidden_states(rank, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(states)
        loss = nn.functional.smooth_l1_loss(predicted.float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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
