"""Trainings in which a model is kept wrongly, each in one way: ``model_faults.py FAULT``."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)
        self.extra = nn.Linear(6, 1)

    def forward(self, inputs: Tensor, *, use_extra: bool = True) -> Tensor:
        hidden = self.body(inputs)
        return self.head(hidden) + (self.extra(hidden) if use_extra else 0)


def batch():
    return torch.randn(8, 6)


def bypassed():
    model = DistributedDataParallel(Net())
    return model, lambda: model.module(batch())


def left_out():
    model = Net()
    fully_shard(model.body)
    return model, lambda: model(batch())


def resharding():
    model = Net()
    fully_shard(model, reshard_after_forward=dist.get_rank() == 0)
    return model, lambda: model(batch())


def one_sided():
    model = Net()
    return model, lambda: model(batch(), use_extra=dist.get_rank() == 0)


def reduce_by_hand(model):
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def main():
    fault = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, forward = globals()[fault]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        forward().square().mean().backward()
        if fault == "one_sided":
            reduce_by_hand(model)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
