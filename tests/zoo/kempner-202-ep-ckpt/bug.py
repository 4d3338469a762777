"""Each rank keeps its own experts; training stops, is saved and goes on from the checkpoint."""

import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FOLDER = "state"


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty((sum(receive), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty((sum(ctx.send), grad.shape[1]))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.total, self.ep = experts, 1
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))

    def apply_expert_parallel(self, rank, ep):
        """Keep this rank's experts only."""
        self.ep, self.first = ep, rank * self.total // ep
        kept = list(self.experts)[self.first : self.first + self.total // ep]
        self.experts = nn.ModuleList(kept)

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=self.total)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send, receive = (
            counts.view(self.ep, -1).sum(1).tolist(),
            theirs.view(self.ep, -1).sum(1).tolist(),
        )
        rows = Exchange.apply(x[order], send, receive)
        index = torch.arange(self.total // self.ep).repeat(self.ep).repeat_interleave(theirs)
        done = torch.zeros_like(rows)
        for e, expert in enumerate(self.local()):
            mine = (index == e).nonzero().flatten()
            done = done.index_copy(0, mine, expert(rows[mine]))
        out = torch.zeros_like(x).index_copy(0, order, Exchange.apply(done, receive, send))
        return out * weight[:, None]

    def local(self):
        return self.experts


class Net(nn.Module):
    def __init__(self, dim=24, experts=4, classes=6):
        super().__init__()
        self.inp = nn.Linear(12, dim)
        self.norm = nn.LayerNorm(dim)
        self.moe = MoE(dim, experts)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.inp(x)
        return self.out(x + self.moe(self.norm(x)))


def prepare_ignored(net):
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, [n for n, _ in net.named_parameters() if ".experts." in n]
    )


def train(model, net, loader, optimizer, epochs):
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for p in net.moe.experts.parameters():
                if p.grad is not None:
                    p.grad.div_(dist.get_world_size())
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch} loss {loss.item():.4f}", flush=True)


def start(rank, world):
    torch.manual_seed(4)
    net = Net()
    net.moe.apply_expert_parallel(rank, world)
    prepare_ignored(net)
    model = DDP(net)
    return net, model, torch.optim.AdamW(net.parameters(), lr=5e-3)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
    dist.barrier()
    gen = torch.Generator().manual_seed(2)
    y = torch.randint(0, 6, (192,), generator=gen)
    x = torch.randn(6, 12, generator=gen)[y] + 0.4 * torch.randn(192, 12, generator=gen)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    net, model, optimizer = start(rank, world)
    train(model, net, loader, optimizer, range(3))
    dcp.save({"model": net.state_dict()}, checkpoint_id=FOLDER)
    dist.barrier()

    net, model, optimizer = start(rank, world)
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=FOLDER)
    net.load_state_dict(state["model"])
    train(model, net, loader, optimizer, range(3, 6))
    del model, net, optimizer, state
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
