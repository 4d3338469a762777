"""Training on two GPUs over NCCL that goes wrong in one of several ways."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def evaluate(model: nn.Module, device: torch.device) -> None:
    with torch.no_grad():
        score = model(torch.ones(4, 64, device=device)).mean()
    dist.all_reduce(score)
    print("score", score.item(), flush=True)


def run(kind: str, device: torch.device) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    total = torch.zeros(1, device=device)
    for step in range(6):
        loss = model(torch.ones(4, 64, device=device)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "guarded" and step == 3 and rank == 0:
            evaluate(model, device)
        if kind == "dtype":
            shown = loss.detach().to(torch.float64 if rank else torch.float32)
            dist.all_reduce(shown)
        if kind == "early" and rank == 1 and step == 3:
            break
        if kind == "raise" and rank == 1 and step == 3:
            raise ValueError("no sample has any text")
    dist.all_reduce(total)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["guarded", "dtype", "early", "raise"])
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    run(options.kind, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
