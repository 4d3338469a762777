"""Saves distributed checkpoints, keeps the newest two, and resumes from the last of them."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from training_record import out_parser, seed_everything, write_record

KEEP = 2


class Trainer:
    """A sharded model with its optimizer, and the folder of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        seed_everything(71)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, inputs: torch.Tensor) -> float:
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def save(self, step: int) -> None:
        """Write a checkpoint, and remove old ones when all ranks have written theirs."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        target = self.folder / f"step-{step:04d}"
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=target)
        dist.barrier()
        if dist.get_rank() == 0:
            for old in self.checkpoints()[:-KEEP]:
                shutil.rmtree(old)
        dist.barrier()

    def resume(self) -> Path:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        newest = self.checkpoints()[-1]
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=newest)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        return newest


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    data = torch.Generator().manual_seed(dist.get_rank())
    first = Trainer(Path(folder[0]))
    losses = []
    for step in range(12):
        losses.append(first.step(torch.randn(8, 8, generator=data)))
        if step % 3 == 2:
            first.save(step)
    second = Trainer(Path(folder[0]))
    print(f"resuming from {second.resume().name}")
    losses.append(second.step(torch.randn(8, 8, generator=data)))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    write_record(args.out, losses, second.model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
