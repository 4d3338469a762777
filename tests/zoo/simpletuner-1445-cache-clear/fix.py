"""Tune a small decoder on latents that are encoded once, by all ranks, into a cache."""

import logging
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_SAMPLES = 24
LATENT_DIM = 16
ENCODER_LOAD_S = 0.25

logger = logging.getLogger("tuner")


class SampleCache:
    """One file for each sample, in a folder that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clear(self) -> None:
        """Forget what an earlier run has left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, sample: int, value: torch.Tensor) -> None:
        torch.save(value, self.folder / f"{sample:04d}.pt")

    def read(self, name: str) -> torch.Tensor:
        return torch.load(self.folder / name)

    def names(self) -> list[str]:
        """Return which samples the cache holds."""
        return sorted(os.listdir(self.folder))


def encode(seed: int, samples: range, cache: SampleCache) -> None:
    """Load an encoder and write this rank's samples."""
    time.sleep(ENCODER_LOAD_S)
    generator = torch.Generator().manual_seed(seed)
    encoder = torch.randn(LATENT_DIM, LATENT_DIM, generator=generator)
    for sample in samples:
        cache.write(sample, encoder[sample % LATENT_DIM] * sample)


def run_earlier() -> None:
    """Leave the latents of a run with fewer samples and another encoder."""
    latents = SampleCache(Path("cache/vae"))
    latents.clear()
    encode(7, range(NUM_SAMPLES // 2), latents)


def prepare(rank: int, world_size: int) -> tuple[SampleCache, SampleCache]:
    """Fill the caches of the text embeddings and of the latents afresh."""
    text, latents = SampleCache(Path("cache/text")), SampleCache(Path("cache/vae"))
    mine = range(rank, NUM_SAMPLES, world_size)
    if rank == 0:
        text.clear()
    dist.barrier()
    encode(1, mine, text)
    if rank == 0:
        latents.clear()
    dist.barrier()
    encode(2, mine, latents)
    dist.barrier()
    return text, latents


def train(text: SampleCache, latents: SampleCache, names: list[str]) -> float:
    """Train on these samples, and return the last loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(LATENT_DIM, LATENT_DIM))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for name in names:
        loss = nn.functional.mse_loss(model(text.read(name)), latents.read(name))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO)

    if rank == 0:
        run_earlier()
    dist.barrier()

    text, latents = prepare(rank, world_size)
    names = latents.names()
    logger.info("rank %d trains on %d samples", rank, len(names))
    loss = train(text, latents, names[rank::world_size])
    logger.info("rank %d last loss %.4f", rank, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
