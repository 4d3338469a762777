"""Ranks that nothing connects: ``unconnected.py WAY``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

WAY = sys.argv[1]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, backward) -> None:
    for _ in range(3):
        inputs = torch.randn(4, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


def main() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if WAY == "one" and os.environ["RANK"] != "0":
        return  # it only serves
    if WAY == "accelerate":
        from accelerate import Accelerator

        # Without a GPU, and not told that it may use CPUs.
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(model, optimizer)
        steps(model, optimizer, accelerator.backward)
    else:
        steps(model, optimizer, torch.Tensor.backward)
    if WAY == "later":
        # The first part tries something out on each rank; they train together from here on.
        dist.init_process_group("gloo")
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
