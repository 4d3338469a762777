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


def biased_by_hand(*, by_all: bool = False):
    model = Biased(TOTAL)

    def forward() -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        model.balance(by_all=by_all)
        return model(torch.randn(32, DIM, generator=generator))

    return model, forward, list(model.parameters())


def balanced_by_hand():
    return biased_by_hand(by_all=True)


class Block(nn.Module):
    """A norm before experts, which are marked as parts; the router is if `is_router_marked`."""

    def __init__(self, layer: Layer, *, is_router_marked: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.layer = layer
        for parameter in layer.experts.parameters():
            parameter.allreduce = False
        layer.gate.weight.allreduce = not is_router_marked

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.norm(tokens))


def marked(*, is_router_marked: bool = False):
    block = Block(parallel(1 + dist.get_rank())[0], is_router_marked=is_router_marked)
    shared = [each for each in block.parameters() if getattr(each, "allreduce", True)]
    return block, lambda: block(torch.randn(32, DIM)), shared


def mismarked():
    return marked(is_router_marked=True)


def combine(shared) -> None:
    """Sum the gradients of a module one by one, those of a list at once."""
    if isinstance(shared, nn.Module):
        for parameter in shared.parameters():
            dist.all_reduce(parameter.grad)
    elif shared:
        gradients = [each.grad for each in shared if each.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, forward, shared = globals()[sys.argv[1]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        torch.manual_seed(100 + step)
        forward().square().mean().backward()
        combine(shared)
        optimizer.step()
        optimizer.zero_grad()
    del model, forward, optimizer, shared
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
