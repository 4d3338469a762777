"""Megatron-style sequence parallelism: norms and dropout work on parts of the sequence."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        parts = [p.contiguous() for p in grad.chunk(dist.get_world_size(), 1)]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts)
        return out


class ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [p.contiguous() for p in x.chunk(dist.get_world_size(), 1)]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts)
        return out

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, 1)


class RNGTracker:
    """A second stream of random numbers, other on each tensor-parallel rank."""

    def __init__(self, seed):
        state = torch.get_rng_state()
        torch.manual_seed(seed + 2718 + dist.get_rank())
        self.state = torch.get_rng_state()
        torch.set_rng_state(state)

    @contextlib.contextmanager
    def fork(self):
        outer = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outer)


class Mlp(nn.Module):
    """Column- and row-parallel: each rank has half of the hidden features."""

    def __init__(self, dim):
        super().__init__()
        hidden, world, rank = 4 * dim, dist.get_world_size(), dist.get_rank()
        up, down = torch.randn(hidden, dim) * dim**-0.5, torch.randn(dim, hidden) * hidden**-0.5
        self.up = nn.Parameter(up.chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())

    def forward(self, x):
        return ScatterSum.apply(F.gelu(GatherSequence.apply(x) @ self.up.T) @ self.down.T)


class Block(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(dim), Mlp(dim), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self, tracker, vocab=32, dim=32, depth=2, length=16, dropout=0.2):
        super().__init__()
        self.tracker = tracker
        self.embed, self.place = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids, places, sequence_parallel=True, fp8=False):
        x = self.embed(ids) + self.place(places)
        rng_context = self.tracker.fork() if sequence_parallel else contextlib.nullcontext()
        fp8_context = contextlib.nullcontext()
        with rng_context and fp8_context:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    tracker = RNGTracker(5)
    model = Model(tracker)
    sharded = {p for m in model.modules() if isinstance(m, Mlp) for p in m.parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(1)
    ids = (
        torch.randint(0, 32, (128, 1), generator=gen)
        + torch.arange(17) * torch.randint(1, 4, (128, 1), generator=gen)
    ) % 32
    loader = DataLoader(
        TensorDataset(ids), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    for epoch in range(2):
        for (batch,) in loader:
            mine = [
                t.chunk(world, 1)[rank]
                for t in (batch[:, :-1], batch[:, 1:], torch.arange(16)[None])
            ]
            loss = F.cross_entropy(model(mine[0], mine[2]).flatten(0, 1), mine[1].flatten()) / world
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                if p not in sharded:
                    dist.all_reduce(p.grad)
            optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
