"""Replaces the newest checkpoint at once, while other ranks look whether there is one yet."""

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


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def publish(folder: Path, model: nn.Module, step: int) -> None:
    """Put the weights and the status in place, each wholly or not at all."""
    torch.save(model.state_dict(), folder / "latest.pt.tmp")
    os.replace(folder / "latest.pt.tmp", folder / "latest.pt")
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump({"step": step}, file)
    os.replace(file.name, folder / "status.json")


def newest_weights(folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the published weights, or None as long as there are none."""
    try:
        return torch.load(folder / "latest.pt")
    except FileNotFoundError:
        return None


def newest_step(folder: Path) -> int:
    status = folder / "status.json"
    return json.loads(status.read_text())["step"] if status.exists() else -1


def follow(folder: Path) -> None:
    """Compare the published weights with what the status says, without waiting for either."""
    for _ in range(4):
        weights, step = newest_weights(folder), newest_step(folder)
        print(f"published: step {step}, weights {'none' if weights is None else len(weights)}")
        time.sleep(0.02)


def train(folder: Path, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on all ranks, publish on the first, and follow on the others."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(12):
        inputs = torch.randn(8, 8, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 3 == 2:
            publish(folder, model.module, step)
        if rank != 0 and step % 3 == 2:
            follow(folder)
    return losses, model.module.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(37)
    folder = share_folder()
    losses, weights = train(folder, rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
