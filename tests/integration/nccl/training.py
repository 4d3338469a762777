"""Correct training on two GPUs over NCCL, in several styles; prints its losses bit for bit."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(kind: str, device: torch.device, width: int = 256) -> nn.Module:
    model = nn.Sequential(*[Block(width) for _ in range(4)], nn.Linear(width, 1)).to(device)
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index])
    if kind == "compile":
        return torch.compile(DistributedDataParallel(model, device_ids=[device.index]))
    if kind == "fsdp2":
        for block in model[:-1]:
            fully_shard(block)
        return fully_shard(model)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model[:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(kind: str, device: torch.device, steps: int) -> list[str]:
    torch.manual_seed(0)
    model = build(kind, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    data = torch.Generator(device=device).manual_seed(1 if kind == "tp" else 1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 256, generator=data, device=device)
        loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.AVG)
        losses.append(shown.item().hex())
    return losses


def exchange(device: torch.device) -> list[str]:
    """Messages in both directions, overlapping collectives on two groups, uneven all-to-all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peer = 1 - rank
    sent, got = torch.full((8,), float(rank), device=device), torch.empty(8, device=device)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
    ):
        work.wait()
    other = dist.new_group(list(range(world)))
    first = dist.all_reduce(sent, async_op=True)
    second = dist.all_reduce(got, group=other, async_op=True)
    first.wait()
    second.wait()
    rows = [1 + rank, 3 - rank]
    expected = [1 if rank == 0 else 3, 2]
    out = torch.empty(sum(expected), 4, device=device)
    dist.all_to_all_single(out, torch.ones(sum(rows), 4, device=device), expected, rows)
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (10 * rank)})
    if rank == 0:
        dist.broadcast(sent, 0)
    else:
        dist.broadcast(got, 0)
    dist.barrier()
    return [sent.sum().item().hex(), got.sum().item().hex(), out.sum().item().hex()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["ddp", "compile", "fsdp2", "tp", "exchange"])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    is_training = options.kind != "exchange"
    losses = train(options.kind, device, options.steps) if is_training else exchange(device)
    if dist.get_rank() == 0:
        print("losses", *losses, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
