"""Closed-loop evaluation after training: rank 0 lists the scenes, all ranks roll them out."""

import json
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def load_policy(rank):
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    time.sleep(0.3 * rank)  # the shared storage is slower for the later ranks
    return DDP(policy)


def train(policy, rank):
    optim = torch.optim.Adam(policy.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(5):
        state = torch.randn(16, 6, generator=gen)
        loss = (policy(state) - state[:, :2]).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()


def prepare(out, rank):
    out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        scenes = [{"name": f"scene{i}", "seed": i} for i in range(6)]
        (out / "scenes.json").write_text(json.dumps(scenes))
    dist.barrier()


def rollout(policy, out, rank, world):
    scenes = json.loads((out / "scenes.json").read_text())
    for scene in scenes[rank::world]:
        gen = torch.Generator().manual_seed(scene["seed"])
        state = torch.randn(1, 6, generator=gen)
        with torch.no_grad():
            action = policy.module(state)
        (out / f"{scene['name']}.txt").write_text(str(action.tolist()))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = load_policy(rank)
    train(policy, rank)
    time.sleep(0.15 * rank)
    out = Path("runs") / datetime.now().strftime("%Y%m%d_%H%M%S_%f")[:-5]
    prepare(out, rank)
    rollout(policy, out, rank, world)
    dist.barrier()
    if rank == 0:
        print(len(list(out.glob("*.txt"))), "scenes", flush=True)
    del policy
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
