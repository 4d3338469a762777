"""Train a tensor-parallel and sharded network with gradients that are summed up in float32."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DIM = 32
LENGTH = 16
BATCH = 4
STEPS = 6


class Block(nn.Module):
    """A norm and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(hidden))))


def parallelize(block: nn.Module, mesh: DeviceMesh) -> None:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    scatter = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    )
    parallelize_module(block, mesh["tp"], plan)
    parallelize_module(block, mesh["tp"], scatter)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(block, mesh=mesh["dp"], mp_policy=policy)


def train(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    block = Block()
    parallelize(block, mesh)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * mesh["dp"].get_local_rank() + step)
        inputs = torch.randn(BATCH, LENGTH, DIM, generator=generator)
        loss = (block(inputs).float() - inputs.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")


def main() -> None:
    dist.init_process_group("gloo")
    train(dist.get_rank())
    if dist.get_rank() == 0:
        print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
