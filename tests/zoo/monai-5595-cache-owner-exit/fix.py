"""Segment small volumes; what was preprocessed once is served to all ranks from a shared cache."""

import logging
import multiprocessing
import shutil
import time
from multiprocessing.managers import BaseManager, DictProxy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path("shared-cache")
ADDRESS = str(FOLDER / "server.sock")
AUTHKEY = b"volumes"
NUM_VOLUMES = 16
VOXELS = 32
UPLOAD_S = 0.25

logger = logging.getLogger("segmentation")


class CacheManager(BaseManager):
    """Serves the preprocessed volumes to all processes that know its address."""


_volumes: dict[int, list[float]] = {}
CacheManager.register("volumes", lambda: _volumes, DictProxy)


def start_server() -> CacheManager:
    """Start the process that holds the cache."""
    FOLDER.mkdir(exist_ok=True)
    server = CacheManager(ADDRESS, AUTHKEY, ctx=multiprocessing.get_context("fork"))
    server.start()
    return server


class CachedVolumes:
    """Volumes that whoever needs them first puts into the cache."""

    def __init__(self) -> None:
        client = CacheManager(ADDRESS, AUTHKEY)
        client.connect()
        self.cache = client.volumes()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            generator = torch.Generator().manual_seed(index)
            self.cache[index] = torch.randn(VOXELS, generator=generator).tolist()
        return torch.tensor(self.cache[index])


def train(model: nn.Module, rank: int, world_size: int) -> None:
    """Train on this rank's volumes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    volumes = CachedVolumes()
    for index in range(rank, NUM_VOLUMES, world_size):
        loss = model(volumes[index][None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate(model: nn.Module, rank: int, world_size: int) -> float:
    """Return the mean score of this rank's volumes."""
    volumes = CachedVolumes()
    with torch.no_grad():
        scores = [model(volumes[i][None]).mean() for i in range(rank, NUM_VOLUMES, world_size)]
    return torch.stack(scores).mean().item()


def fit(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Train and evaluate a model, and return its weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(VOXELS, 32), nn.ReLU()))
    train(model, rank, world_size)
    logger.info("rank %d score %.4f", rank, evaluate(model.module, rank, world_size))
    return model.module.state_dict()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO)
    server = start_server() if rank == 0 else None
    dist.barrier()

    weights = fit(rank, world_size)
    dist.barrier()
    if server is not None:
        torch.save(weights, "model.pt")
        time.sleep(UPLOAD_S)  # the weights go to the registry
        server.shutdown()
        shutil.rmtree(FOLDER)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
