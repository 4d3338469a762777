"""Fine-tuning under DDP with dropout; every process sets the seed of the run, as a trainer does."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Encoder(nn.Module):
    def __init__(self, dim=32, classes=6):
        super().__init__()
        self.inp = nn.Linear(20, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * dim, dim)
            )
            for _ in range(2)
        )
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    set_seed(42)
    model = DDP(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(1)
    y = torch.randint(0, 6, (256,), generator=gen)
    x = torch.randn(6, 20, generator=gen)[y] + 0.6 * torch.randn(256, 20, generator=gen)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=42)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
