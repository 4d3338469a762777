"""Trains with FSDP2 on two-dimensional meshes: hybrid sharding, and tensor parallelism below it."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training_record import out_parser, seed_everything, write_record

DIM = 16


class Block(nn.Module):
    """Norm and feed-forward beside a residual connection, with a scale for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 3 * DIM)
        self.down = nn.Linear(3 * DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.register_buffer("window", torch.hann_window(DIM), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.down(torch.relu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Blocks and a head that has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def shard(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def hybrid(mesh: DeviceMesh) -> nn.Module:
    """Build on the meta device, shard, and initialise alike on all ranks."""
    with torch.device("meta"):
        model = Model()
    shard(model, mesh)
    model.to_empty(device="cpu")
    seed_everything(8)
    for block in model.blocks:
        block.window.copy_(torch.hann_window(DIM))
        nn.init.ones_(block.scale)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    return model


def loaded_on_one_rank(mesh: DeviceMesh) -> nn.Module:
    """Load on rank 0 only, and send each rank its shards from there."""
    seed_everything(9 + dist.get_rank())
    model = Model()
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    shard(model, mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    return model


def with_tensor_parallelism(mesh: DeviceMesh) -> nn.Module:
    seed_everything(10)
    model = Model()
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    shard(model, mesh["dp"])
    return model


def build_models(sizes: tuple[int, int]) -> list[nn.Module]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
    both = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    return [hybrid(mesh), loaded_on_one_rank(mesh), with_tensor_parallelism(both)]


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    models = [*build_models((2, 1)), *build_models((1, 2))]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in models]
    own, shared = torch.Generator().manual_seed(40 + rank), torch.Generator().manual_seed(50)
    losses = []
    for step in range(4):
        mine, same = (torch.randn(6, DIM, generator=each) for each in (own, shared))
        for number, model in enumerate(models):
            # The two ranks of the last model are one tensor-parallel group, and see the same batch.
            inputs = same if number == len(models) - 1 else mine
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {losses[-1]:.4f}")
    write_record(args.out, losses, {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
