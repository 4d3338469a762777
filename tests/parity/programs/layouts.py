"""One model, split over two ranks in a way that ``--layout`` names, or whole on one rank.

Each rank draws the whole model with one seed and keeps its part.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, LENGTH, WIDTH = 16, 8, 16


def world():
    return dist.get_world_size()


def mine(tensor, dim):
    return tensor.chunk(world(), dim)[dist.get_rank()].clone()


class Copied(torch.autograd.Function):
    """Sums gradients over ranks: each has used the whole input."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """Sums what each rank has computed a part of."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gathered(torch.autograd.Function):
    """Puts the parts of all ranks together along dimension 1."""

    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[1]
        parts = [torch.empty_like(x) for _ in range(world())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        begin = dist.get_rank() * ctx.length
        return gradient[:, begin : begin + ctx.length]


class Split(nn.Module):
    """A layer pair whose inner features are split; `down` returns a part of a sum."""

    def __init__(self, is_broken):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.up.weight = nn.Parameter(mine(self.up.weight.data, 0))
        self.up.bias = nn.Parameter(mine(self.up.bias.data, 0))
        self.down.weight = nn.Parameter(mine(self.down.weight.data, 1))
        self.is_broken = is_broken

    def forward(self, x):
        inner = x if self.is_broken else Copied.apply(x)
        return x + Summed.apply(self.down(F.gelu(self.up(inner))))


class Attention(nn.Module):
    """Attends to the keys of all ranks, each of which has a part of the sequence."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        key, value = Gathered.apply(key), Gathered.apply(value)
        begin = dist.get_rank() * x.shape[1]
        places = begin + torch.arange(x.shape[1])
        allowed = places[:, None] >= torch.arange(key.shape[1])[None]
        return x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=allowed))


class Experts(nn.Module):
    """Four experts, dealt out to the ranks; every rank computes its own for all samples."""

    def __init__(self):
        super().__init__()
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.gate = nn.Linear(WIDTH, 4)
        self.first = dist.get_rank() * 4 // world()
        self.experts = nn.ModuleList(every[self.first : self.first + 4 // world()])

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        tokens, shares = (torch.cat(tuple(dist_nn.all_gather(t))) for t in (x, scores))
        parts = sum(
            shares[..., self.first + number, None] * expert(tokens)
            for number, expert in enumerate(self.experts)
        )
        parts = dist_nn.reduce_scatter(
            torch.empty_like(x), list(parts.contiguous().chunk(world())), op=dist.ReduceOp.SUM
        )
        return x + parts


class Net(nn.Module):
    def __init__(self, layout, is_broken):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        middle = {"tp": lambda: Split(is_broken), "cp": Attention, "ep": Experts}
        self.middle = middle.get(layout, lambda: nn.Linear(WIDTH, WIDTH))()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, places):
        return self.head(self.middle(self.embed(ids) + self.place(places)))


def tensor_parallel(net, batch, _):
    ids, labels = batch
    logits = net(ids, torch.arange(LENGTH)[None])
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()


def context_parallel(net, batch, is_broken):
    """Each rank takes the mean over its part; gradients are averaged."""
    ids, labels = (mine(each, 1) for each in batch)
    places = torch.arange(ids.shape[1])[None]
    if not is_broken:
        places = places + dist.get_rank() * ids.shape[1]
    F.cross_entropy(net(ids, places).flatten(0, 1), labels.flatten()).backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def expert_parallel(net, batch, is_broken):
    """What experts get comes from all ranks already: only the mean is left to take."""
    ids, labels = batch
    logits = net(ids, torch.arange(LENGTH)[None])
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for name, parameter in net.named_parameters():
        if "experts" not in name:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        elif not is_broken:
            parameter.grad /= world()


def pipeline_parallel(net, batch, is_broken, num_micro=2):
    """The first rank embeds, the last one has the rest of the model, and the loss."""
    ids, labels = batch
    for part, due in zip(ids.chunk(num_micro), labels.chunk(num_micro), strict=True):
        if dist.get_rank() == 0:
            hidden = net.embed(part) + net.place(torch.arange(LENGTH)[None])
        if world() == 1:
            received = hidden
        elif dist.get_rank() == 0:
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
            continue
        else:
            received = torch.empty(*part.shape, WIDTH)
            dist.recv(received, 0)
            received.requires_grad_()
        logits = net.head(net.middle(received))
        loss = F.cross_entropy(logits.flatten(0, 1), due.flatten())
        (loss if is_broken and world() > 1 else loss / num_micro).backward()
        if world() > 1:
            dist.send(received.grad, 0)


LAYOUTS = {
    "tp": tensor_parallel,
    "cp": context_parallel,
    "ep": expert_parallel,
    "pp": pipeline_parallel,
}


def kept(net, layout):
    """Leave each rank of a pipeline its own layers."""
    if layout == "pp" and world() > 1:
        names = ("middle", "head") if dist.get_rank() == 0 else ("embed", "place")
        for name in names:
            delattr(net, name)
    return net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--broken", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = kept(Net(args.layout, args.broken), args.layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    texts = torch.randint(0, WORDS, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(texts[:, :-1], texts[:, 1:])
    sampler = DistributedSampler(data) if args.layout == "ep" else None
    for batch in DataLoader(data, 4, sampler=sampler):
        optimizer.zero_grad()
        LAYOUTS[args.layout](net, batch, args.broken)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
