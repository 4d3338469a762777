"""Newbob: the learning rate of the next epoch depends on the dev score of the last one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class NewbobControl:
    def __init__(self, lr, decay=0.5, threshold=0.02):
        self.lr, self.decay, self.threshold = lr, decay, threshold
        self.scores = []

    def next_rate(self):
        if len(self.scores) >= 2:
            old, new = self.scores[-2:]
            if (old - new) / old < self.threshold:
                self.lr *= self.decay
        return self.lr


class Engine:
    def __init__(self, train, dev):
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.control = NewbobControl(0.05)
        self.train_loader = DataLoader(train, batch_size=8, sampler=DistributedSampler(train))
        self.dev_loader = DataLoader(
            dev, batch_size=8, sampler=DistributedSampler(dev, shuffle=False)
        )

    def train_epoch(self, epoch):
        for group in self.optim.param_groups:
            group["lr"] = self.control.next_rate()
        self.train_loader.sampler.set_epoch(epoch)
        for x, y in self.train_loader:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()

    @torch.no_grad()
    def eval_dev(self):
        total, count = 0.0, 0
        for x, y in self.dev_loader:
            total += nn.functional.mse_loss(self.model.module(x), y, reduction="sum").item()
            count += len(x)
        return total / count


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(4)
    x = torch.randn(160, 10, generator=g)
    y = (x[:, :1] - x[:, 1:2]).tanh() + 0.8 * torch.randn(160, 1, generator=g)
    engine = Engine(TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:]))
    for epoch in range(8):
        engine.train_epoch(epoch)
        score = engine.eval_dev()
        engine.control.scores.append(score)
        print(
            f"rank {dist.get_rank()} epoch {epoch} dev {score:.4f} lr {engine.control.lr}",
            flush=True,
        )
    del engine
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
