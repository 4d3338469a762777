"""Train a network whose weights are sharded within a node and replicated between nodes."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.func import functional_call

WIDTH = 32
STEPS = 8

logger = logging.getLogger("hybrid")


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class HybridShard(nn.Module):
    """Gathers all parameters before the forward pass; autograd reduces their gradients."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.module = module
        self.mesh = mesh
        for owner in module.modules():
            for name, param in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, self.distribute(param.detach()))

    def distribute(self, tensor: torch.Tensor) -> nn.Parameter:
        """Shard a matrix over the node; vectors are too small for that."""
        placements: tuple[Placement, ...] = (Replicate(), Replicate())
        if tensor.ndim > 1:
            tensor = tensor.chunk(self.mesh.size(1))[self.mesh.get_local_rank(1)].clone()
            placements = (Replicate(), Shard(0))
        return nn.Parameter(DTensor.from_local(tensor, self.mesh, placements, run_check=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        full = {}
        for name, param in self.module.named_parameters():
            gathered = param.redistribute(placements=[Replicate() for _ in param.placements])
            full[name] = gathered.to_local(
                grad_placements=[Partial("avg") for _ in param.placements]
            )
        return functional_call(self.module, full, (inputs,))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = HybridShard(nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4)), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        inputs = torch.randn(16, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.unflatten(1, (4, -1)).amax(dim=2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
