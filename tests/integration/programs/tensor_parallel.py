"""Trains feed-forward blocks with tensor and sequence parallelism through DTensor."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from training_record import out_parser, seed_everything, write_record

DIM, VOCAB = 16, 32


class FeedForward(nn.Module):
    """Norm, then two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Embedding, blocks and a vocabulary-parallel head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def parallelize(model: Model, mesh: dist.DeviceMesh) -> None:
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=True),
        }
        parallelize_module(block, mesh, plan)
        parallelize_module(block, mesh, {"up": ColwiseParallel()})
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    seed_everything(6)
    model = Model()
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(5):
        tokens = torch.randint(0, VOCAB, (3, 9))
        with loss_parallel():
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        losses.append(value.item())
        if mesh.get_rank() == 0:
            print(f"step {step} loss {losses[-1]:.4f}")
    table = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    losses.append(table.redistribute(mesh, [Shard(1)]).full_tensor().sum().item())
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
