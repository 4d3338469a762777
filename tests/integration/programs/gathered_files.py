"""Writes a file of each rank into one folder, gathers their names, and merges them on rank 0."""

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


def write_predictions(folder: Path, model: nn.Module, inputs: torch.Tensor) -> str:
    """Write what the model says of this rank's inputs, and return where."""
    os.makedirs(folder / "predictions", exist_ok=True)
    path = folder / "predictions" / f"rank-{dist.get_rank()}.json"
    with open(path, "w") as file:
        json.dump(model(inputs).flatten().tolist(), file)
    return str(path)


def merge(folder: Path, paths: list[str]) -> str:
    """Put the predictions of all ranks into one file."""
    merged = []
    for path in paths:
        with open(path) as file:
            merged += json.load(file)
    target = folder / "predictions.json"
    target.write_text(json.dumps(merged))
    return str(target)


def train(folder: Path, rank: int, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, and merge what the ranks predict after every few steps."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        for _ in range(4):
            inputs = torch.randn(8, 8, generator=data)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        path = write_predictions(folder, model.module, inputs)
        paths: list[str] | None = [""] * world_size if rank == 0 else None
        dist.gather_object(path, paths, dst=0)
        target = [merge(folder, paths) if rank == 0 else None]
        dist.broadcast_object_list(target, src=0)
        assert len(json.loads(Path(target[0]).read_text())) == 8 * world_size
        dist.barrier()
    return losses, model.module.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(53)
    folder = share_folder()
    losses, weights = train(folder, rank, world_size)
    if rank == 0:
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
