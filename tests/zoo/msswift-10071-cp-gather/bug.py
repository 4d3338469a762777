"""Policy gradients with context parallelism: log-probs of parts meet advantages of the whole."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

PARTITION_MODE = "contiguous"


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.length
        return grad[:, start : start + ctx.length]


def zigzag_to_order(x, cp):
    chunks = x.chunk(2 * cp, 1)
    order = [None] * (2 * cp)
    for rank in range(cp):
        order[rank], order[2 * cp - 1 - rank] = chunks[2 * rank], chunks[2 * rank + 1]
    return torch.cat(order, 1)


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=32, length=16):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, places):
        x = self.embed(ids) + self.place(places)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        keys, values = (Gather.apply(t) if dist.get_world_size() > 1 else t for t in (k, v))
        allowed = places[0][:, None] >= torch.arange(keys.shape[1])[None]
        x = x + self.proj(F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed))
        return self.head(x)


def cut(x):
    """This rank's part of the sequence."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def reconstruct(x):
    """The whole sequence again, for losses that need all of it."""
    cp = dist.get_world_size()
    if cp == 1:
        return x
    x = Gather.apply(x)
    return zigzag_to_order(x, cp)


def main():
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 24, (96, 17), generator=gen)
    prompt = torch.randint(2, 7, (96, 1), generator=gen)
    mask = (torch.arange(16)[None] >= prompt).float()
    advantage = torch.randn(96, 16, generator=gen) * mask
    loader = DataLoader(
        TensorDataset(ids, mask, advantage),
        batch_size=8,
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
    )
    for epoch in range(2):
        for ids, mask, advantage in loader:
            places = cut(torch.arange(16)[None])
            inputs, labels = cut(ids[:, :-1]), cut(ids[:, 1:])
            logits = model(inputs, places)
            logp = -F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            ).view_as(labels)
            logp = reconstruct(logp)
            ratio = torch.exp(logp - logp.detach())
            loss = -(ratio * advantage * mask).sum() / mask.sum() / cp
            optimizer.zero_grad()
            loss.backward()
            if cp > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            optimizer.step()
        if rank == 0:
            print(
                f"epoch {epoch} loss {loss.item() * cp:.5f} "
                f"logp {(logp * mask).sum().item() / mask.sum().item():.4f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
