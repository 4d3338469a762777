"""Tensor-parallel MLP blocks whose row-wise layers have a bias; `--tp 1` is the whole model."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset


class RowwiseLinear(nn.Linear):
    """Works on a slice of the features; what comes out is a part of a sum over the ranks."""

    def forward(self, x):
        if not isinstance(self.weight, DTensor):
            return super().forward(x)
        mesh = self.weight.device_mesh
        bias = self.bias.to_local()
        bias = bias / mesh.size()
        part = F.linear(x, self.weight.to_local(), bias)
        return (
            DTensor.from_local(part, mesh, [Partial()])
            .redistribute(placements=[Replicate()])
            .to_local()
        )


class ColwiseLinear(nn.Linear):
    def forward(self, x):
        if not isinstance(self.weight, DTensor):
            return super().forward(x)
        mesh = self.weight.device_mesh
        x = DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return F.linear(x, self.weight.to_local(), self.bias.to_local())


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = ColwiseLinear(dim, 4 * dim), RowwiseLinear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=24, classes=8, depth=2):
        super().__init__()
        self.inp = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def parallelize(net, mesh):
    for block in net.blocks:
        for layer, weight, bias in (
            (block.up, Shard(0), Shard(0)),
            (block.down, Shard(1), Replicate()),
        ):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [weight]))
            layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [bias]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    if args.tp > 1:
        parallelize(net, init_device_mesh("cpu", (args.tp,), mesh_dim_names=("tp",)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(1)
    y = torch.randint(0, 8, (160,), generator=gen)
    x = torch.randn(8, 16, generator=gen)[y] + 0.5 * torch.randn(160, 16, generator=gen)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(4)
    )
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            bias = net.blocks[0].down.bias
            bias = bias.to_local() if isinstance(bias, DTensor) else bias
            print(f"epoch {epoch} loss {loss.item():.5f} bias {bias[:3].tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
