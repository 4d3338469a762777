"""Saves distributed checkpoints in the background while training goes on."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from training_record import out_parser, seed_everything, write_record


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    checkpoint_group = dist.new_group(backend="gloo", group_desc="checkpoint")
    seed_everything(79)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    data = torch.Generator().manual_seed(dist.get_rank())
    pending, losses = None, []
    for step in range(12):
        inputs = torch.randn(8, 8, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 4 == 1:
            if pending is not None:
                pending.result()
            pending = dcp.async_save(
                {"model": model.state_dict()},
                checkpoint_id=str(Path(folder[0]) / f"step-{step}"),
                process_group=checkpoint_group,
            )
    pending.result()
    dist.barrier()
    if dist.get_rank() == 0:
        print(sorted(path.name for path in Path(folder[0]).iterdir()))
        shutil.rmtree(folder[0])
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
