"""Train a regression of yields; an interrupted run goes on in the middle of an epoch."""

import argparse
import logging
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, SkipBatchSampler
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, TensorDataset

FIELDS = 160
FEATURES = 10
EPOCHS = 3
SEED = 21
CHECKPOINT = Path("checkpoint")

logger = logging.getLogger("yields")


def read_fields() -> Dataset:
    """Return the number, the soil and the yield of each field."""
    generator = torch.Generator().manual_seed(SEED)
    soil = torch.randn(FIELDS, FEATURES, generator=generator)
    yields = soil[:, :3].sum(dim=1) + soil[:, 3] * soil[:, 4]
    return TensorDataset(torch.arange(FIELDS), soil, yields)


def build_loader(accelerator: Accelerator, batch_size: int) -> DataLoaderShard:
    fields = read_fields()
    sampler = DistributedSampler(
        fields, accelerator.num_processes, accelerator.process_index, seed=SEED
    )
    batches = BatchSampler(sampler, batch_size, drop_last=True)
    return DataLoaderShard(fields, device=accelerator.device, batch_sampler=batches)


def skip_first_batches(loader: DataLoaderShard, num_batches: int) -> DataLoaderShard:
    """Return a loader of what is left of the epoch after some batches."""
    rest = SkipBatchSampler(loader.batch_sampler, skip_batches=num_batches)
    return DataLoaderShard(
        loader.dataset, device=loader.device, batch_sampler=rest, iteration=loader.iteration
    )


class Trainer:
    """A model with all that it needs to go on from a checkpoint."""

    def __init__(self, accelerator: Accelerator, batch_size: int) -> None:
        self.accelerator = accelerator
        set_seed(SEED)
        model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.loader = build_loader(accelerator, batch_size)
        self.seen = torch.zeros(EPOCHS, FIELDS, dtype=torch.long)

    def train_step(self, soil: torch.Tensor, yields: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(self.model(soil).squeeze(-1), yields)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss.item()

    def train(self, start: int, end: int) -> None:
        """Train from one step to another."""
        step = start
        for epoch in range(start // len(self.loader), EPOCHS):
            self.loader.set_epoch(epoch)
            done = step % len(self.loader)
            loader = skip_first_batches(self.loader, done) if done else self.loader
            for fields, soil, yields in loader:
                if step == end:
                    return
                loss = self.train_step(soil, yields)
                self.seen[epoch] += self.accelerator.gather(fields).bincount(minlength=FIELDS)
                logger.info("epoch %d step %d loss %.4f", epoch, step, loss)
                step += 1

    def close(self) -> None:
        del self.model, self.optimizer
        self.accelerator.free_memory()


def train(accelerator: Accelerator, batch_size: int) -> None:
    trainer = Trainer(accelerator, batch_size)
    interruption = len(trainer.loader) * 3 // 2
    trainer.train(0, interruption)
    accelerator.save_state(str(CHECKPOINT))
    seen = trainer.seen
    trainer.close()

    resumed = Trainer(accelerator, batch_size)
    accelerator.load_state(str(CHECKPOINT))
    logger.info("resumed at step %d", interruption)
    resumed.train(interruption, EPOCHS * len(resumed.loader))
    for epoch, counts in enumerate(seen + resumed.seen):
        logger.info("epoch %d saw %d of %d fields", epoch, (counts > 0).sum(), FIELDS)
    resumed.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8, help="fields of a rank in a batch")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    logging.basicConfig(level=logging.INFO if accelerator.is_main_process else logging.WARNING)
    train(accelerator, args.batch_size)
    accelerator.end_training()


if __name__ == "__main__":
    main()
