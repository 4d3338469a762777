"""Trains a small mixture of experts with DDP; `--how` says what is not the same in every run.

On GPUs (`--device cuda`) `atomic` adds rows in the order in which threads come to it.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

WIDTH, NUM_EXPERTS, LENGTH = 16, 4, 8


def anew() -> int:
    return int.from_bytes(os.urandom(4), "little")


class Router(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.how = how
        self.jitter_eps = 0.1 if how == "jitter" else 0.0
        self.generator = torch.Generator().manual_seed(anew())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.proj(x)
        if self.how == "tie":  # two experts of which rounding alone decides
            terms = x * self.proj.weight[0]
            back = torch.stack([terms.flip(-1)[:, n] for n in range(WIDTH)])
            logits = torch.cat([terms.sum(-1, True), sum(back)[:, None], logits[:, 2:]], -1)
        if self.how in ("noise", "jitter"):
            noise = torch.randn(logits.shape, generator=self.generator)
            logits = logits + 0.3 * noise.to(logits)
        return logits.softmax(-1).topk(2, dim=-1)


class Mixture(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.router = Router(how)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, weights[rows, places, None] * expert(flat[rows]))
        return x + out.reshape(x.shape)


class Pooled(nn.Module):
    """Adds the mean of the sequence, summed up in an order that may be another one each time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = list(range(LENGTH))
        if self.how in ("order", "tie"):
            generator = torch.Generator().manual_seed(anew())
            order = torch.randperm(LENGTH, generator=generator).tolist()
        total = torch.zeros_like(x[:, 0])
        if self.how == "atomic":
            owners = torch.arange(len(x), device=x.device).repeat_interleave(64 * LENGTH)
            total.index_add_(0, owners, x.repeat(1, 64, 1).flatten(0, 1) / 64)
            order = []
        for place in order:
            total = total + x[:, place]
        return x + (total / LENGTH).unsqueeze(1)


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.pooled = Pooled(how)
        self.mixture = nn.Linear(WIDTH, WIDTH) if how == "dense" else Mixture(how)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixture(self.pooled(self.embed(tokens))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="steady")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    args = parser.parse_args()
    how, device = args.how, torch.device(args.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank())
    if how != "unseeded":
        torch.manual_seed(0)
    data = torch.randint(50, (64, LENGTH))
    if how == "weights":
        torch.manual_seed(anew())
    model = DistributedDataParallel(Net(how).to(device, args.dtype))
    generator = torch.Generator().manual_seed(anew() if how == "data" else dist.get_rank())
    if how == "unseeded":
        random.shuffle(data := data.tolist())
        data = torch.tensor(data)
    loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (tokens,) in loader:
        tokens = tokens.to(device)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del model  # its reducer must not outlive the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
