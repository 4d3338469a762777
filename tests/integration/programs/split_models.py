"""Models split in several ways at once: tensors with FSDP2 and dropout, sequences, pipelines."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

VOCAB, WIDTH, LENGTH = 32, 16, 8


class Attention(nn.Module):
    """Causal self-attention over the heads that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = [layer(hidden) for layer in (self.query, self.key, self.value)]
        q, k, v = (part.view(batch, length, -1, 4).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention and a feed-forward part, each with a norm and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        return hidden + self.dropout(self.down(self.up(self.norm2(hidden)).relu()))


class Language(nn.Module):
    """A small decoder."""

    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def split(model: Language, mesh: DeviceMesh, *, sequence: bool) -> None:
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    for block in model.blocks:
        plan = {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": rows,
            "up": ColwiseParallel(),
            "down": rows,
        }
        if sequence:
            gathered = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            plan |= {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": gathered,
                "up": ColwiseParallel(input_layouts=Shard(1)),
            }
        parallelize_module(block, mesh, plan)
    if sequence:
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }
        parallelize_module(model, mesh, ends)


def train(model: nn.Module, group_rank: int, losses: list[float], *, parallel_loss: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(60 + group_rank)  # by data-parallel rank
    for _ in range(4):
        tokens = torch.randint(0, VOCAB, (4, LENGTH), generator=generator)
        targets = tokens.roll(-1, 1)
        optimizer.zero_grad()
        if parallel_loss:
            with loss_parallel():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        if parallel_loss:  # else the norms are on a mesh of their own
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))


def tensors(way: str, losses: list[float]) -> nn.Module:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Language(dropout=0.1 if way == "dropout" else 0.0)
    split(model, mesh["tp"], sequence=way == "sequence")
    if way == "dropout":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
    if world > 2:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(1000 + mesh["dp"].get_local_rank())  # the same dropout within a TP group
    train(model, mesh["dp"].get_local_rank(), losses, parallel_loss=way == "sequence")
    return model


def pipelined(way: str, losses: list[float]) -> nn.Module:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "pp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    whole = Language(blocks=4)
    layers = [whole.embedding, *whole.blocks, nn.Sequential(whole.norm, whole.head)]
    chunks = 4 if way == "interleaved" else 2
    cuts = [len(layers) * n // chunks for n in range(chunks + 1)]
    parts = [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]
    mine = parts[rank::2]
    if world > 2:
        mine = [
            DistributedDataParallel(part, process_group=mesh["dp"].get_group()) for part in mine
        ]
    stages = [
        PipelineStage(part, rank + 2 * n, chunks, torch.device("cpu"), group=group)
        for n, part in enumerate(mine)
    ]

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    if way == "interleaved":
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=criterion)
    else:
        schedule = Schedule1F1B(stages[0], 4, loss_fn=criterion)
    optimizer = torch.optim.AdamW([p for part in mine for p in part.parameters()], lr=1e-2)
    generator = torch.Generator().manual_seed(60 + mesh["dp"].get_local_rank())
    for _ in range(4):
        tokens = torch.randint(0, VOCAB, (8, LENGTH), generator=generator)
        parts_of_loss: list[Tensor] = []
        arguments = (tokens,) if rank == 0 else ()
        if rank == 1:
            schedule.step(*arguments, target=tokens.roll(-1, 1), losses=parts_of_loss)
        else:
            schedule.step(*arguments)
        optimizer.step()
        optimizer.zero_grad()
        if parts_of_loss:
            losses.append(torch.stack(parts_of_loss).mean().item())
    return nn.ModuleList(mine)


def main() -> None:
    ways = dict.fromkeys(("dropout", "plain", "sequence"), tensors)
    ways |= dict.fromkeys(("1f1b", "interleaved"), pipelined)
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(ways), default="plain")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    losses: list[float] = []
    model = ways[args.way](args.way, losses)
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
