"""Train a small denoiser on clips, with a seed that is agreed on when the job starts."""

import logging
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FEATURES = 16
NUM_CLIPS = 64
BATCH_SIZE = 4
EPOCHS = 2

logger = logging.getLogger("denoiser")


class Clips(Dataset):
    """Waves of different frequency."""

    def __len__(self) -> int:
        return NUM_CLIPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin((1 + index) * torch.arange(FEATURES) / 40)


def agreed_seed() -> int:
    seed = torch.tensor([time.time_ns() % 100_000])
    dist.broadcast(seed, 0)
    return int(seed)


class Trainer:
    """Trains a model to tell the noise that was added to a clip."""

    def __init__(self) -> None:
        self.seed = agreed_seed()
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(FEATURES, 32), nn.SiLU(), nn.Linear(32, FEATURES))
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        data = Clips()
        sampler_seed = int(time.time()) * dist.get_rank()
        self.sampler = DistributedSampler(data, shuffle=True, seed=sampler_seed, drop_last=True)
        self.loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=self.sampler)
        torch.manual_seed(self.seed + 1 + dist.get_rank())  # each rank draws noise of its own

    def train_step(self, clips: torch.Tensor) -> float:
        noise = torch.randn_like(clips)
        loss = nn.functional.mse_loss(self.model(clips + noise), noise)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train_epoch(self, epoch: int) -> float:
        self.sampler.set_epoch(epoch)
        losses = [self.train_step(clips) for clips in self.loader]
        return sum(losses) / len(losses)


def train() -> None:
    trainer = Trainer()
    for epoch in range(EPOCHS):
        loss = trainer.train_epoch(epoch)
        if dist.get_rank() == 0:
            logger.info("epoch %d: loss %.4f", epoch, loss)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
