"""A small vision-language model under FSDP2; some batches hold text only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(12, 16)
        self.mlp = nn.Linear(16, 16)

    def forward(self, pixels):
        return self.mlp(torch.relu(self.patch(pixels)))


class VLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.vision = Vision()
        self.lm = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 40))

    def forward(self, ids, pixels):
        x = self.embed(ids)
        if pixels is not None:
            seen = self.vision(pixels)
            x = torch.cat([seen, x[:, seen.size(1) :]], 1)
        return self.lm(x)


def batches(rank, steps):
    gen = torch.Generator().manual_seed(60 + rank)
    for step in range(steps):
        ids = torch.randint(40, (2, 10), generator=gen)
        has_image = not (rank == 1 and step == 3)
        yield ids, torch.randn(2, 4, 12, generator=gen) if has_image else None


def main():
    torch.manual_seed(0)
    model = VLM()
    fully_shard(model.vision)
    fully_shard(model.lm)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (ids, pixels) in enumerate(batches(dist.get_rank(), 8)):
        logits = model(ids, pixels)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
