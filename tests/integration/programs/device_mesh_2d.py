"""Trains on two-dimensional meshes of FSDP2 and tensor parallelism, and reduces on their axes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training_record import out_parser, seed_everything, write_record


def train(shape: tuple[int, int], num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    dp_mesh, tp_mesh = mesh["dp_shard"], mesh["tp"]
    seed_everything(8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 1))
    parallelize_module(model, tp_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=dp_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    data = torch.Generator().manual_seed(50 + dp_mesh.get_local_rank())
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(4, 8, generator=data)
        loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss, group=dp_mesh.get_group())
        agreed = mean_loss.clone()
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=tp_mesh.get_group())
        losses.append(agreed.item() / dp_mesh.size())
    return losses, model.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    losses, weights = [], {}
    for index, shape in enumerate(((1, world_size), (world_size, 1))):
        more_losses, state = train(shape, num_steps=4)
        losses += more_losses
        weights |= {f"{index}.{name}": value for name, value in state.items()}
    # Each rank reports its own row; groups of one rank are legal and need no partner.
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replica", "alone"))
    for _ in range(dist.get_rank() + 1):
        dist.all_reduce(torch.ones(2), group=alone["alone"].get_group())
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
