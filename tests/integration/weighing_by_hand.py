"""Trains a small language model whose ranks share sequences, and combines gradients by hand."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as gather_and_sum
from torch.nn import functional as F

VOCAB, DIM, HEADS, LENGTH, BATCH, STEPS = 32, 16, 4, 24, 3, 4


class Exchange(torch.autograd.Function):
    """Cut a tensor along one dimension, and join what other ranks send along another one."""

    @staticmethod
    def forward(ctx, tensor: Tensor, cut: int, join: int) -> Tensor:
        ctx.dims = cut, join
        return exchange(tensor, cut, join)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cut, join = ctx.dims
        return exchange(grad, join, cut), None, None


def exchange(tensor: Tensor, cut: int, join: int) -> Tensor:
    parts = torch.stack(tensor.chunk(dist.get_world_size(), dim=cut))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(list(received), dim=join)


class Gather(torch.autograd.Function):
    """Join the parts of all ranks; each gets the gradient of its own, summed if `is_summed`."""

    @staticmethod
    def forward(ctx, part: Tensor, dim: int, is_summed: bool) -> Tensor:
        ctx.dim, ctx.is_summed = dim, is_summed
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        if ctx.is_summed:
            dist.all_reduce(grad)
        parts = grad.chunk(dist.get_world_size(), ctx.dim)
        return parts[dist.get_rank()].contiguous(), None, None


class Attention(nn.Module):
    """Causal attention over sequences of which each rank has a part, in one of two ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.qkv, self.out, self.how = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), how

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (HEADS, -1))
        if self.how == "heads":
            query, key, value = Exchange.apply(heads, 2, 1).transpose(1, 2).chunk(3, dim=-1)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.out(Exchange.apply(mixed.transpose(1, 2), 1, 2).flatten(2))
        query, key, value = heads.transpose(1, 2).chunk(3, dim=-1)
        if self.how == "context":
            key, value = Gather.apply(key, 2, True), Gather.apply(value, 2, True)
        first = dist.get_rank() * query.shape[2] if self.how == "context" else 0
        places = first + torch.arange(query.shape[2])
        mask = torch.arange(key.shape[2]) <= places[:, None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(VOCAB, DIM), Attention(how)
        self.mlp, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(hidden)
        return self.head(hidden + self.mlp(hidden).relu())


def own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def over_all(logits: Tensor, labels: Tensor) -> Tensor:
    """The tokens of all ranks have the same weight; some do not count."""
    count = (labels != -100).sum()
    dist.all_reduce(count)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def over_gathered(logits: Tensor, labels: Tensor) -> Tensor:
    """Each rank has the loss of the whole sequence, and the gradient of its part."""
    return own_mean(Gather.apply(logits, 1, False), Gather.apply(labels, 1, False))


def mean_of_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack(list(gather_and_sum(own_mean(logits, labels)))).mean()


WORLD = 2
PROGRAMS = {
    # name: how ranks share sequences, the loss, its factor, what the sum is divided by
    "own part added up": ("heads", own_mean, 1, 1),
    "context counted": ("context", over_all, WORLD, 1),
    "heads counted": ("heads", over_all, WORLD, 1),
    "context divided": ("context", over_all, 1, WORLD),
    "own part counted": ("heads", own_mean, WORLD, WORLD),
    "own part averaged": ("heads", own_mean, 1, WORLD),
    "context averaged": ("context", over_all, WORLD, WORLD),
    "heads added up": ("heads", over_all, 1, 1),
    "gathered": ("heads", over_gathered, 1, 1),
    "mean of ranks": ("context", mean_of_ranks, 1, WORLD),
    "data added up": ("data", over_all, 1, 1),
    "data averaged": ("data", over_all, WORLD, WORLD),
    "heavy": ("data", over_all, 2.0, 1),
    "own data added up": ("data", own_mean, 1, 1),
    "clipped": ("heads", own_mean, 1, 0),
}


def combine(model: nn.Module, divisor: float) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor or WORLD
    if not divisor:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def main(name: str) -> None:
    dist.init_process_group("gloo")
    how, loss_of, factor, divisor = PROGRAMS[name]
    torch.manual_seed(0)
    model = Model(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank if how == "data" else 0)
    for _ in range(STEPS):
        text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
        tokens, labels = text[:, :-1], text[:, 1:].clone()
        labels[:, : 5 + rank if how == "data" else 5] = -100
        if how != "data":
            tokens, labels = (each.chunk(WORLD, 1)[rank] for each in (tokens, labels))
        loss = loss_of(model(tokens), labels.contiguous())
        if type(factor) is int:
            loss = loss * (dist.get_world_size() if factor == WORLD else 1)
        else:
            loss = loss * factor
        loss.backward()
        combine(model, divisor)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
