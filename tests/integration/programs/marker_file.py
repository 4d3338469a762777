"""Waits for files by looking again and again: for a marker, and for what is there at once."""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

NUM_SHARDS = 4


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def prepare(folder: Path) -> None:
    """Write the shards, then the marker that says they are complete, then the settings."""
    generator = torch.Generator().manual_seed(2)
    (folder / "shards").mkdir()
    for shard in range(NUM_SHARDS):
        torch.save(torch.randn(16, 8, generator=generator), folder / "shards" / f"{shard}.pt")
    replace_text(folder / "DONE", f"{NUM_SHARDS}\n")
    time.sleep(0.1)
    replace_text(folder / "settings.json", json.dumps({"lr": 0.05}))


def read_shards(folder: Path) -> torch.Tensor:
    """Wait until the marker is there, and read what it stands for."""
    while not (folder / "DONE").exists():
        time.sleep(0.01)
    names = sorted(os.listdir(folder / "shards"))
    return torch.cat([torch.load(folder / "shards" / name) for name in names])


def read_settings(folder: Path) -> dict[str, float]:
    """Try to read the settings until they can be read."""
    while True:
        try:
            return json.loads((folder / "settings.json").read_text())
        except FileNotFoundError:
            time.sleep(0.01)


def train(data: torch.Tensor, lr: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on this rank's rows, and return the losses and the weights."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in data.split(4):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.module.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(59)
    folder = share_folder()
    if rank == 0:
        prepare(folder)
    data, settings = read_shards(folder), read_settings(folder)
    losses, weights = train(data[rank::world_size], settings["lr"])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
