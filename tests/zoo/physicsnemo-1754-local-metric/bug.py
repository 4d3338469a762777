"""Surrogate of a flow field under DDP; rank 0 logs the metrics and keeps the best checkpoint."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FOLDER = tempfile.mkdtemp(prefix="surrogate-")


class MetricCalculator:
    def __init__(self, process_group=None):
        self.process_group = process_group
        self.sums, self.count = {}, 0

    def update(self, output, target):
        error = (output - target).detach()
        self.sums["mse"] = self.sums.get("mse", 0.0) + error.square().mean().item() * len(target)
        self.sums["mae"] = self.sums.get("mae", 0.0) + error.abs().mean().item() * len(target)
        self.count += len(target)

    def compute(self):
        keys = sorted(self.sums)
        values = torch.tensor(
            [self.sums[k] for k in keys] + [float(self.count)], dtype=torch.float64
        )
        values = self._all_reduce(values)
        return {k: (values[i] / values[-1]).item() for i, k in enumerate(keys)}

    def _all_reduce(self, values):
        if self.process_group is None:
            return values
        dist.all_reduce(values, group=self.process_group)
        return values


def fields(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=gen)
    w = torch.randn(10, 6, generator=torch.Generator().manual_seed(77))
    return TensorDataset(x, torch.sin(x @ w))


def run_epoch(model, loader, optimizer, group):
    metrics = MetricCalculator(process_group=group)
    model.train(optimizer is not None)
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            out = model(x)
            loss = F.mse_loss(out, y)
            metrics.update(out, y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return metrics.compute()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 48), nn.GELU(), nn.Linear(48, 6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train, held = fields(192, 1), fields(64, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    held_loader = DataLoader(held, batch_size=16, sampler=DistributedSampler(held, shuffle=False))
    best = float("inf")
    for epoch in range(5):
        sampler.set_epoch(epoch)
        trained = run_epoch(model, loader, optimizer, None)
        seen = run_epoch(model, held_loader, None, None)
        if rank == 0:
            print(f"epoch {epoch} train {trained} held-out {seen}", flush=True)
            if seen["mse"] < best:
                best = seen["mse"]
                torch.save(model.module.state_dict(), os.path.join(FOLDER, "best.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
