"""Train a small model that describes windows of time series, on the data of all ranks."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 24
CLASSES = 4
NUM_WINDOWS = 128
BATCH_SIZE = 8
EPOCHS = 2

logger = logging.getLogger("series")


def windows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (NUM_WINDOWS,), generator=generator)
    time = torch.arange(WINDOW).float()
    series = torch.sin((1 + labels.unsqueeze(1)) * time / 4)
    return TensorDataset(series + 0.3 * torch.randn(series.shape, generator=generator), labels)


class SeriesModel(nn.Module):
    """Encodes a window and tells its class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WINDOW, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, CLASSES)

    def compute_loss(self, series: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.encoder(series)), labels)

    def forward(self, series: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.compute_loss(series, labels)


class Trainer:
    """Trains the model and tells the loss of rank 0."""

    def __init__(self) -> None:
        torch.manual_seed(17)
        self.model = DistributedDataParallel(SeriesModel())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        data = windows()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=self.sampler)

    def unwrapped(self) -> SeriesModel:
        return self.model.module

    def train_epoch(self, epoch: int) -> float:
        self.sampler.set_epoch(epoch)
        total = 0.0
        for series, labels in self.loader:
            self.optimizer.zero_grad()
            loss = self.unwrapped().compute_loss(series, labels)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / len(self.loader)


def train() -> None:
    trainer = Trainer()
    for epoch in range(EPOCHS):
        loss = trainer.train_epoch(epoch)
        if dist.get_rank() == 0:
            logger.info("epoch %d: loss %.4f", epoch, loss)
    weight = trainer.unwrapped().head.weight.detach().norm()
    logger.info("rank %d: norm of the head %.6f", dist.get_rank(), weight)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
