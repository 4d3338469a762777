"""Sums gradients by hand over the ranks that split the tokens, and forgets some or none: ``WAY``.

Without exchanges: ``right``, ``norm`` or ``router`` (forgotten), ``personal`` (each rank trains a
head of its own), ``blocks`` (or its last layers), ``lazy`` (routers are averaged now and then).
Between gathered parts of sequences: ``parts``, and ``parts-forgotten``.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WIDTH, WORDS, LENGTH, STEPS, EVERY = 16, 32, 16, 6, 4


class Gather(torch.autograd.Function):
    """Gather the parts of sequences; their gradients are summed and split again."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return summed_part(gradient)


class Scatter(torch.autograd.Function):
    """Sum over the ranks and keep the own part of sequences; gradients are gathered."""

    @staticmethod
    def forward(ctx, whole: Tensor) -> Tensor:
        return summed_part(whole)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return Gather.forward(ctx, gradient)


def summed_part(whole: Tensor) -> Tensor:
    whole = whole.clone()
    dist.all_reduce(whole)
    return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class Experts(nn.Module):
    """Chooses one of two experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        weights = self.router(hidden).softmax(-1)
        made = torch.stack([expert(hidden) for expert in self.experts], -1)
        return (made * weights.unsqueeze(-2)).sum(-1).tanh()


class Shards(nn.Module):
    """Each rank holds some of the columns, and the rows that belong to them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        whole = Gather.apply(self.norm(hidden))
        return Scatter.apply(self.down(self.up(whole).tanh())) + self.bias


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


FORGOTTEN = {
    "norm": ("layers.1.norm.weight",),
    "router": (".router.",),
    "lazy": (".router.",),
    "personal": ("head.",),
    "blocks": ("layers.2.", "head."),
    "parts": (".up.", ".down."),
    "parts-forgotten": (".up.", ".down.", ".norm.", ".bias"),
}


def build(way: str) -> Net:
    torch.manual_seed(0)
    net = Net(Shards if way.startswith("parts") else Experts)
    torch.manual_seed(1 + dist.get_rank())
    for layer in net.layers:
        if isinstance(layer, Shards):
            layer.up.reset_parameters()
            layer.down.reset_parameters()
    return net


def combine(net: Net, way: str) -> None:
    """Sum gradients over the ranks, since each has those of its tokens only."""
    for name, parameter in net.named_parameters():
        if not any(part in name for part in FORGOTTEN.get(way, ())):
            dist.all_reduce(parameter.grad)


def average(net: Net) -> None:
    for layer in net.layers:
        dist.all_reduce(layer.router.weight.data)
        layer.router.weight.data /= dist.get_world_size()


def main(way: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = build(way)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        words = torch.randint(WORDS, (4, LENGTH), generator=data)
        part = words.chunk(world, 1)[rank]
        optimizer.zero_grad()
        logits = net(part)
        loss = cross_entropy(logits.flatten(0, 1), (part.flatten() * 5 + 1) % WORDS) / world
        loss.backward()
        combine(net, way)
        optimizer.step()
        if way == "lazy" and step % EVERY == EVERY - 1:
            average(net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
