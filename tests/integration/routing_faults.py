"""Trainings whose experts are kept wrongly, each in one way: ``routing_faults.py FAULT``."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DIM, TOTAL = 8, 4


class Exchange(torch.autograd.Function):
    """Add up what the ranks' experts made; each rank gets the gradient of its own."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Layer(nn.Module):
    """Routes tokens to the experts of this rank, which may be a part of all."""

    def __init__(self, num_local: int) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, TOTAL, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_local))
        self.first = dist.get_rank() * num_local if num_local < TOTAL else 0

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts, self.first):
            mine = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + expert(tokens) * mine
        return tokens + (Exchange.apply(out) if len(self.experts) < TOTAL else out)


def parallel(seed: int):
    torch.manual_seed(0)
    layer = Layer(TOTAL // dist.get_world_size())
    torch.manual_seed(seed)
    for expert in layer.experts:
        expert.reset_parameters()
    return layer, lambda: layer(torch.randn(32, DIM)), layer.gate


def twice():
    return parallel(1)


def parts():
    return parallel(1 + dist.get_rank())


def unequal():
    model = DistributedDataParallel(Layer(TOTAL))
    with torch.no_grad():
        model.module.gate.weight.mul_(1 - 2 * dist.get_rank())
    return model, lambda: model(torch.randn(32, DIM)), None


class Biased(Layer):
    """Chooses by scores and a bias that follows the counts of tokens."""

    def __init__(self, num_local: int) -> None:
        super().__init__(num_local)
        self.register_buffer("expert_bias", torch.zeros(TOTAL))
        self.register_buffer("counts", torch.zeros(TOTAL))

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.gate(tokens).sigmoid()
        chosen = (scores + self.expert_bias).topk(2, -1)[1]
        self.counts += torch.bincount(chosen.flatten(), minlength=TOTAL)
        out = tokens
        for index, expert in enumerate(self.experts):
            weights = scores.gather(1, chosen) * (chosen == index)
            out = out + expert(tokens) * weights.sum(-1, keepdim=True)
        return out

    def balance(self, *, by_all: bool) -> None:
        if by_all:
            dist.all_reduce(self.counts)
        self.expert_bias += 0.01 * (self.counts.mean() - self.counts).sign()
        self.counts.zero_()


def biased(*, by_all: bool = False):
    model = DistributedDataParallel(
        Biased(TOTAL), broadcast_buffers=False, find_unused_parameters=True
    )

    def forward() -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        model.module.balance(by_all=by_all)
        return model(torch.randn(32, DIM, generator=generator))

    return model, forward, None


def balanced():
    return biased(by_all=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, forward, shared = globals()[sys.argv[1]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        torch.manual_seed(100 + step)
        forward().square().mean().backward()
        for parameter in shared.parameters() if shared is not None else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    del model, forward, optimizer, shared
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
