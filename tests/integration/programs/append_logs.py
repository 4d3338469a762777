"""Writes logs of one rank, a log that all append to, and scratch files that nobody else knows."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

NUM_STEPS = 8


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def spill_and_restore(folder: Path, tensor: torch.Tensor) -> torch.Tensor:
    """Keep a tensor on disk for a moment, under the names of this process."""
    scratch = folder / f"spill-{os.getpid()}.pt"
    torch.save(tensor, scratch)
    with tempfile.NamedTemporaryFile(dir=folder) as other:
        torch.save(tensor, other)
        other.flush()
        assert torch.load(other.name).equal(tensor)
    restored = torch.load(scratch)
    scratch.unlink()
    return restored


def count_lines(path: Path) -> int:
    with open(path) as file:
        return sum(1 for _ in file)


def train(folder: Path, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train and log each step."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    losses = []
    with open(folder / f"rank-{rank}.log", "a") as log:
        for step in range(NUM_STEPS):
            inputs = spill_and_restore(folder, torch.randn(8, 8, generator=data))
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            log.write(f"step {step} loss {loss.item():.4f}\n")
            with open(folder / "events.log", "a") as events:
                events.write(f"rank {rank} finished step {step}\n")
    return losses, model.module.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(31)
    folder = share_folder()
    losses, weights = train(folder, rank)
    dist.barrier()
    if rank == 0:
        assert count_lines(folder / "events.log") == NUM_STEPS * world_size
        for path in sorted(folder.glob("rank-*.log")):
            print(path.name, count_lines(path))
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
