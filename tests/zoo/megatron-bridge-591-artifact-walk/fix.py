"""Train with checkpoints that the last rank registers with the experiment tracker."""

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINTS = Path("checkpoints")
SAVE_EVERY = 4
STEPS = 8
TRACKER_LATENCY_S = 0.2

logger = logging.getLogger("train")


class Artifact:
    """The files of one checkpoint, as the tracker will know them."""

    def __init__(self, name: str) -> None:
        time.sleep(TRACKER_LATENCY_S)  # the tracker gives it a version
        self.name = name
        self.digests: dict[str, str] = {}
        self.num_bytes = 0

    def add_dir(self, folder: Path) -> None:
        """Add all files below a folder."""
        for root, _, names in os.walk(folder):
            for name in names:
                self.add_file(os.path.join(root, name))

    def add_file(self, path: str) -> None:
        """Add one file with its size and digest."""
        self.num_bytes += os.path.getsize(path)
        with open(path, "rb") as file:
            self.digests[path] = hashlib.md5(file.read()).hexdigest()


def write_config(config: dict[str, float], path: Path) -> None:
    """Write the configuration so that it is there wholly or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump(config, file)
    os.replace(temporary, path)


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, float], step: int
) -> None:
    """Write the weights, each rank's optimizer state and the configuration."""
    rank, folder = dist.get_rank(), CHECKPOINTS / f"iter_{step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(optimizer.state_dict(), folder / f"optimizer_{rank}.pt")
    if rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    dist.barrier()
    if rank == 0:
        write_config(config, folder / "run_config.json")
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        artifact = Artifact(folder.name)
        artifact.add_dir(folder)
        logger.info("registered %d files, %d bytes", len(artifact.digests), artifact.num_bytes)


def train(config: dict[str, float]) -> float:
    """Train with checkpoints on the way, and return the last loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for step in range(1, STEPS + 1):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            save_checkpoint(model.module, optimizer, config, step)
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    config = {"lr": 1e-2, "hidden": 32, "weight_decay": 0.1}
    logger.info("rank %d last loss %.4f", dist.get_rank(), train(config))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
