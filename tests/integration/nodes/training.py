"""Training on two nodes over gloo that is right, or goes wrong in one of several ways."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def evaluate():
    dist.all_reduce(torch.ones(1))


def log_sizes():
    dist.all_reduce(torch.ones(4 + dist.get_rank()))


def save():
    time.sleep(600)


def may_end(go):
    reported = torch.tensor([go is None or go.exists()])
    dist.broadcast(reported, 0)
    return reported.item()


def train(options):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    while step < options.steps or not may_end(options.go):
        loss = model(torch.ones(4, 8)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(options.pause)
        print("step", step, loss.item(), flush=True)
        if options.kind == "sizes" and step == 3:
            log_sizes()
        if options.kind == "guarded" and step == 3:
            if dist.get_rank() == 0:
                evaluate()
            save()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["healthy", "guarded", "sizes"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--go", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
