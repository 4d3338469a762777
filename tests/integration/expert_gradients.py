"""Trains experts that all-to-alls bring tokens to, in one of several ways: ``... STYLE [ADAM]``."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

DIM, VOCABULARY, TOKENS, STEPS = 16, 32, 64, 4


class Exchange(torch.autograd.Function):
    """Send equal parts of the rows to all ranks of a group."""

    @staticmethod
    def forward(ctx, rows: Tensor, group, scale: float) -> Tensor:
        ctx.group, ctx.scale = group, scale
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor):
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.group)
        return received * ctx.scale, None, None


class Scale(torch.autograd.Function):
    """Leave the values and scale the gradient."""

    @staticmethod
    def forward(ctx, values: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.scale, None


class Layer(nn.Module):
    """Each rank of the group has one expert; the first tokens of each rank go to the first one."""

    def __init__(self, group, style: str) -> None:
        super().__init__()
        self.group, self.style = group, style
        self.size = dist.get_world_size(group)
        self.gate = nn.Linear(DIM, self.size, bias=False)
        self.norm = nn.LayerNorm(DIM)
        self.expert = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        there = Exchange.apply(self.norm(tokens), self.group, float(self.size) ** self.is_scaled)
        made = self.expert(there)
        if self.style == "hook-between":
            made.register_hook(lambda gradient: gradient / self.size)
        if self.style == "scale-function":
            made = Scale.apply(made, 1 / self.size)
        back = Exchange.apply(made, self.group, 1 / float(self.size) ** self.is_scaled)
        chosen = torch.arange(len(tokens)) * self.size // len(tokens)
        weights = self.gate(tokens).softmax(-1).gather(1, chosen.unsqueeze(1))
        return tokens + back * weights

    @property
    def is_scaled(self) -> bool:
        return self.style == "exchange"


class Net(nn.Module):
    def __init__(self, group, style: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer(group, style) for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def build(style: str) -> Net:
    torch.manual_seed(0)
    net = Net(dist.group.WORLD, style)
    torch.manual_seed(100 + dist.get_rank())
    for layer in net.layers:
        for part in (layer.expert[0], layer.expert[2]):
            part.reset_parameters()
    return net


def combine(net: Net, style: str) -> None:
    """Average dense gradients over all ranks; each expert has one owner."""
    world = dist.get_world_size()
    for name, parameter in net.named_parameters():
        if ".expert." in name:
            if style == "divided":
                parameter.grad.div_(world)
            if style == "twice":
                parameter.grad.div_(world).div_(world)
            if style == "mixed":
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world)
        else:
            dist.all_reduce(parameter.grad)
            if style != "sum":
                parameter.grad.div_(world)


def combine_in_bucket(net: Net) -> None:
    dense = [p.grad for name, p in net.named_parameters() if ".expert." not in name]
    flat = torch.cat([gradient.flatten() for gradient in dense])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(dense, flat.split([g.numel() for g in dense]), strict=True):
        gradient.copy_(part.view_as(gradient))


def main(style: str, kind: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = build(style)
    if style == "hook-on-parameter":
        for name, parameter in net.named_parameters():
            if ".expert." in name:
                parameter.register_hook(lambda gradient: gradient / world)
    model = net
    if style == "ddp":
        ours = {name for name, _ in net.named_parameters() if ".expert." in name}
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ours)
        model = nn.parallel.DistributedDataParallel(net)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=data)
        targets = (tokens * 7 + 3) % VOCABULARY
        optimizer.zero_grad()
        if style == "sum":
            loss = cross_entropy(model(tokens), targets, reduction="sum") / (TOKENS * world)
        else:
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
        if style == "bucket":
            combine_in_bucket(net)
        elif style != "ddp":
            combine(net, style)
        if style == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    del model, net  # its reducer must not outlive the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "SGD")
