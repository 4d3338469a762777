"""Trains under the first FSDP with `use_orig_params`, a model that rank 0 has sent round before."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training_record import out_parser, seed_everything, write_record

WIDTH = 16


class Block(nn.Module):
    """A residual network whose last layer begins at zero, as an adapter does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


def sharded(way: str) -> FullyShardedDataParallel:
    """Make a model, give all ranks that of rank 0, and shard it."""
    model = nn.Sequential(nn.Linear(8, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))
    model.register_buffer("scale", torch.ones(()))
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    options = {}
    if way == "hybrid":
        options["device_mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "fsdp"))
    if way == "mixed":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    strategies = {
        "grad-op": ShardingStrategy.SHARD_GRAD_OP,
        "hybrid": ShardingStrategy.HYBRID_SHARD,
        "whole": ShardingStrategy.NO_SHARD,
    }
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategies.get(way, ShardingStrategy.FULL_SHARD),
        device_id=torch.device("cpu"),
        use_orig_params=way != "flat",
        **options,
    )


def main() -> None:
    parser = out_parser()
    ways = ("flat", "full", "grad-op", "hybrid", "mixed", "whole")
    parser.add_argument("--way", choices=ways, default="full")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(23 + dist.get_rank())
    model = sharded(args.way)
    with FullyShardedDataParallel.summon_full_params(model):
        print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=data)
        loss = (model(inputs).float() - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        losses += [loss.item(), model.clip_grad_norm_(1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
