"""Tensor-parallel MLP trained with Muon; `--tp 1` is the same model on one rank."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


def orthogonalise(matrix, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    flip = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if flip else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                p.add_(self.direction(update), alpha=-group["lr"])

    def direction(self, update):
        if not isinstance(update, DTensor):
            return orthogonalise(update)
        mesh, placements = update.device_mesh, update.placements
        part = orthogonalise(update.to_local())
        return DTensor.from_local(part, mesh, placements, run_check=False)


class Net(nn.Module):
    def __init__(self, dim=32, classes=8):
        super().__init__()
        self.inp = nn.Linear(16, dim)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.inp(x)
        return self.out(x + self.down(F.gelu(self.up(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    if args.tp > 1:
        mesh = init_device_mesh("cpu", (args.tp,), mesh_dim_names=("tp",))
        parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    muon = Muon([net.up.weight, net.down.weight])
    adam = torch.optim.AdamW([*net.inp.parameters(), *net.out.parameters()], lr=3e-3)
    gen = torch.Generator().manual_seed(1)
    y = torch.randint(0, 8, (192,), generator=gen)
    x = torch.randn(8, 16, generator=gen)[y] + 0.7 * torch.randn(192, 16, generator=gen)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(4)
    )
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            muon.zero_grad()
            adam.zero_grad()
            loss.backward()
            muon.step()
            adam.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
