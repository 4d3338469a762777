"""Shards dense parameters over all ranks, and experts over those that hold the same ones."""

import sys

import torch
import torch.distributed as dist
from expert_gradients import TOKENS, VOCABULARY, Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


def main(style: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("edp", "ep"))
    whole = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    net = Net(mesh["ep"].get_group(), style)
    torch.manual_seed(100 + mesh["ep"].get_local_rank())
    for layer in net.layers:
        for part in (layer.expert[0], layer.expert[2]):
            part.reset_parameters()
        fully_shard(layer.expert, mesh=mesh["edp"])
        if style == "factor":
            layer.expert.set_gradient_divide_factor(float(world))
            layer.expert.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        fully_shard(layer, mesh=whole)
    fully_shard(net, mesh=whole)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=data)
        optimizer.zero_grad()
        loss = cross_entropy(net(tokens), (tokens * 7 + 3) % VOCABULARY)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
