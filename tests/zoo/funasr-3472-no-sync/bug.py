"""Train a small speech model with DDP; the last of some micro-batches is synchronised."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, dim=40, vocab=12):
        super().__init__()
        self.front = nn.Conv1d(dim, 48, 3, padding=1)
        self.norm = nn.LayerNorm(48)
        self.out = nn.Linear(48, vocab)

    def forward(self, x):
        return self.out(self.norm(F.relu(self.front(x.transpose(1, 2))).transpose(1, 2)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    gen = torch.Generator().manual_seed(1)
    y = torch.randint(0, 12, (256, 10), generator=gen)
    x = torch.randn(12, 40, generator=gen)[y] + 0.8 * torch.randn(256, 10, 40, generator=gen)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    accum_grad = 4
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch_idx, (x, y) in enumerate(loader):
            is_boundary = batch_idx % accum_grad == 0
            context = nullcontext() if is_boundary else model.no_sync()
            with context:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accum_grad
                loss.backward()
            if (batch_idx + 1) % accum_grad == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(
            f"rank {rank} epoch {epoch} loss {loss.item() * accum_grad:.4f} "
            f"weight {model.module.out.weight[0, :2].tolist()}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
