"""Lets every rank write what all of them would write, and put the same cache in place."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def save_config(folder: Path, config: dict[str, float]) -> None:
    """Write the configuration, as all ranks do when they save a model."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "config.json", "w") as file:
        json.dump(config, file, indent=1, sort_keys=True)


def prepare(folder: Path) -> torch.Tensor:
    """Compute the data and put it in place; the last one to come replaces it by the same."""
    cache = folder / "data.pt"
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        torch.save(data, file)
    os.replace(temporary, cache)
    return torch.load(cache)


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
    seed_everything(43)
    folder = share_folder()
    save_config(folder / "model", {"lr": 0.05, "weight_decay": 0.1})
    data = prepare(folder)
    dist.barrier()
    config = json.loads((folder / "model" / "config.json").read_text())
    losses, weights = train(data[rank::world_size], config["lr"])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
