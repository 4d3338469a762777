"""MoE transformer with multi-token prediction; a bias balances the experts, without a loss."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TokenChoiceRouter(nn.Module):
    def __init__(self, dim, experts, top_k):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.top_k = top_k

    def forward(self, x, bias):
        scores = self.gate(x).sigmoid()
        _, chosen = torch.topk(scores + bias, self.top_k, dim=-1)
        weight = scores.gather(-1, chosen)
        return weight / weight.sum(-1, keepdim=True), chosen


class MoE(nn.Module):
    def __init__(self, dim, experts=4, top_k=2):
        super().__init__()
        self.router = TokenChoiceRouter(dim, experts, top_k)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            for _ in range(experts)
        )
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("tokens_per_expert", torch.zeros(experts), persistent=False)

    def forward(self, x):
        weight, chosen = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(
                torch.bincount(chosen.flatten(), minlength=len(self.experts))
            )
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            share = (weight * (chosen == e)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.moe = MoE(dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab=64, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(depth)})
        self.mtp_layers = nn.ModuleList([Block(dim)])
        self.mtp_join = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x)
        ahead = self.mtp_join(torch.cat([x[:, :-1], self.embed(ids[:, 1:])], -1))
        for layer in self.mtp_layers:
            ahead = layer(ahead)
        return self.head(self.norm(x)), self.head(self.norm(ahead))


def balancing_hook(model, group, rate=0.02):
    def moe_layers():
        for layer in model.layers.values():
            yield layer.moe

    @torch.no_grad()
    def update(*_):
        counts = torch.stack([moe.tokens_per_expert for moe in moe_layers()])
        dist.all_reduce(counts, group=group)
        for moe, count in zip(moe_layers(), counts, strict=True):
            delta = rate * torch.sign(count.mean() - count)
            moe.expert_bias.add_(delta - delta.mean())
            moe.tokens_per_expert.zero_()

    return update


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(11)
    model = Model()
    for layer in list(model.layers.values()) + list(model.mtp_layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer.register_step_pre_hook(balancing_hook(model, mesh.get_group()))
    gen = torch.Generator().manual_seed(1)
    ids = (
        torch.randint(0, 64, (160, 1), generator=gen)
        + torch.randint(1, 3, (160, 1), generator=gen) * torch.arange(18)
    ) % 64
    data = TensorDataset(ids)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            now, ahead = model(batch[:, :-1])
            loss = F.cross_entropy(now.flatten(0, 1), batch[:, 1:].flatten())
            loss = loss + 0.3 * F.cross_entropy(ahead.flatten(0, 1), batch[:, 2:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 5 == 0:
                bias = model.mtp_layers[0].moe.expert_bias.tolist()
                print(f"step {step} loss {loss.item():.4f} mtp bias {bias}", flush=True)
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
