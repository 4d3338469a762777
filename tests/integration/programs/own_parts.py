"""Trains models of which each rank holds a part of its own, beside what wrappers keep alike."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

DIM = 8


class Expert(nn.Module):
    """A feed-forward layer that one rank alone holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(hidden)))


class SharedAndOwn(nn.Module):
    """A trunk that all ranks share, and the expert of this rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        seed_everything(seed)
        self.trunk = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 1)
        seed_everything(seed + 1 + dist.get_rank())
        self.expert = Expert()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(hidden))
        return self.head(hidden + self.expert(hidden))


class ChunkOfContext(nn.Module):
    """Sees the tokens of its own chunk of the sequence, and knows where that begins."""

    def __init__(self, length: int) -> None:
        super().__init__()
        first = dist.get_rank() * length
        self.register_buffer("positions", torch.arange(first, first + length), persistent=False)
        self.embed = nn.Embedding(length * dist.get_world_size(), DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden + self.embed(self.positions))


def with_ignored_expert() -> nn.Module:
    """Leave the expert out of DDP."""
    model = SharedAndOwn(seed=20)
    own = [f"expert.{name}" for name, _ in model.expert.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return DistributedDataParallel(model)


def with_plain_expert() -> nn.Module:
    """Shard all but the expert."""
    model = SharedAndOwn(seed=22)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, ignored_params=set(model.expert.parameters()))


def with_expert_on_own_mesh() -> nn.Module:
    """Shard the expert over the ranks that hold it: here it is one."""
    model = SharedAndOwn(seed=24)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "ep_shard"))
    fully_shard(model.expert, mesh=mesh["ep_shard"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def with_chunks(length: int) -> nn.Module:
    seed_everything(26)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(ChunkOfContext(length), mesh=mesh)


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    models = [with_ignored_expert(), with_plain_expert(), with_expert_on_own_mesh(), with_chunks(6)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False) for model in models]
    seed_everything(33 + dist.get_rank())
    losses = []
    for _ in range(5):
        inputs = torch.randn(6, DIM)
        for model in models:
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            losses.append(loss.item())
        # One rank holds this expert: its norm is complete without a reduction.
        expert_norm = nn.utils.clip_grad_norm_(models[2].expert.parameters(), 1.0)
        losses.append(expert_norm.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses[-len(models) - 1 :]))
    write_record(args.out, losses, {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
