"""What ranks should have in common, and what not, in many styles: ``related.py wrong|right``.

Each way trains a model with a class of its own, by which findings tell which way they are about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

STEPS, ROWS, WIDTH = 6, 8, 16
DATA = torch.randn(256, 4, WIDTH, generator=torch.Generator().manual_seed(5))


class Plain(nn.Module):
    """Two layers and what may be drawn between them."""

    p = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(self.p)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.between(self.first(rows)))

    def between(self, hidden: Tensor) -> Tensor:
        return self.drop(hidden)


class Parts(torch.autograd.Function):
    """Sum over ranks, and keep this rank's part of the sequence."""

    @staticmethod
    def forward(ctx, whole: Tensor) -> Tensor:
        parts = [part.contiguous() for part in whole.chunk(dist.get_world_size(), 1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return whole_of(gradient)


class Whole(torch.autograd.Function):
    """Gather the parts of a sequence."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        return whole_of(part)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return Parts.forward(ctx, gradient)


class Summed(torch.autograd.Function):
    """Sum over ranks; all of them go on with the result."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def whole_of(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)


def mine(number: int) -> Tensor:
    """The rows of this rank for a step."""
    return DATA[ROWS * (2 * number + dist.get_rank()) :][:ROWS]


def same(number: int) -> Tensor:
    """Rows that all ranks take."""
    return DATA[ROWS * number :][:ROWS]


def half(number: int) -> Tensor:
    """This rank's half of the sequences that all ranks take."""
    return same(number).chunk(2, 1)[dist.get_rank()]


def train(
    model: nn.Module,
    rows: Callable[[int], Tensor] | Iterator[Tensor],
    *,
    reduced: Callable[[str], bool] = lambda _: False,
) -> None:
    """Train, and reduce the gradients of the parameters with these names."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = map(rows, range(STEPS)) if callable(rows) else rows
    for batch in batches:
        loss = (model(batch) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if reduced(name):
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()


def train_and_evaluate(model: nn.Module, *, is_averaged: bool = False) -> None:
    """Train, and go through data that all ranks have, by what the model keeps of its samples."""
    train(model, mine)
    for buffer in model.buffers() if is_averaged else ():
        if buffer.is_floating_point():
            dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
    with torch.no_grad():
        model.eval()(DATA[:ROWS])


def everything(name: str) -> bool:
    return True


def seeded(*, by_rank: bool) -> None:
    torch.manual_seed(100 + (dist.get_rank() if by_rank else 0))


def kind(name: str, base: type[nn.Module] = Plain, **values: object) -> nn.Module:
    """Make a model of a class of its own, alike on all ranks."""
    torch.manual_seed(3)
    return type(name, (base,), values)()


# Models that draw in other ways


class Functional(Plain):
    def between(self, hidden: Tensor) -> Tensor:
        return functional.dropout(hidden, 0.3, self.training)


class Attending(Plain):
    def between(self, hidden: Tensor) -> Tensor:
        heads = hidden[:, None]
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)[:, 0]


class Noisy(Plain):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden)


class Gathering(Plain):
    """Given all sequences, it works on parts of them."""

    def forward(self, rows: Tensor) -> Tensor:
        part = self.between(self.first(rows.chunk(2, 1)[dist.get_rank()]))
        return self.last(Whole.apply(part))


class Ring(Plain):
    """Given parts of sequences, it passes them on to the next rank."""

    def between(self, hidden: Tensor) -> Tensor:
        other, rank = torch.empty_like(hidden), dist.get_rank()
        calls = [
            dist.P2POp(dist.isend, hidden.detach().contiguous(), 1 - rank),
            dist.P2POp(dist.irecv, other, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return self.drop(hidden) + other


class Late(Plain):
    """Draws for what the two layers have computed together."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.drop(self.last(self.first(rows)))


class Normalised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Columns(nn.Module):
    """Column- and row-parallel by hand; `scatters`: between them the sequence is in parts."""

    scatters, forks = False, False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        up, down = torch.randn(2, WIDTH, WIDTH), torch.randn(2, WIDTH, WIDTH)
        self.up = nn.Parameter(up[dist.get_rank()] * WIDTH**-0.5)
        self.down = nn.Parameter(down[dist.get_rank()] * WIDTH**-0.5)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(WIDTH, 1)
        self.generator = torch.Generator().manual_seed(50 + dist.get_rank())

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        shares = (Summed.apply(hidden) @ self.up).relu() @ self.down
        if not self.scatters:
            return self.last(self.drop(Summed.apply(shares)))
        return self.last(Whole.apply(self.dropped(Parts.apply(shares))))

    def dropped(self, part: Tensor) -> Tensor:
        if not self.forks:
            return self.drop(part)
        outer = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        part = self.drop(part)
        self.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(outer)
        return part


class Stream(IterableDataset):
    """The rows of all ranks one after the other, or those of this rank."""

    def __init__(self, *, split: bool) -> None:
        self.split = split

    def __iter__(self) -> Iterator[Tensor]:
        for index, row in enumerate(DATA[: ROWS * STEPS * (2 if self.split else 1)]):
            if not self.split or index % 2 == dist.get_rank():
                yield row


def planned(name: str, base: type[nn.Module] = Plain, **values: object) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    return parallelize_module(kind(name, base, **values), mesh, plan)


def shuffled(num_parts: int) -> Iterator[Tensor]:
    """Batches of this rank's part of the data."""
    part = dist.get_rank() % num_parts
    sampler = DistributedSampler(DATA, num_parts, part, seed=7)
    yield from DataLoader(DATA, ROWS, sampler=sampler, drop_last=True)


def replicated(name: str) -> bool:
    return name.startswith(("first", "last"))


def wrong() -> None:
    train(DistributedDataParallel(kind("SameSlices")), same)
    train(fully_shard(kind("SameSlicesSharded")), same)
    train(kind("SameSlicesByHand"), same, reduced=everything)
    for name, base, wrap, rows in (
        ("Masks", Plain, DistributedDataParallel, mine),
        ("MasksOfFunctions", Functional, fully_shard, mine),
        ("MasksOfAttention", Attending, DistributedDataParallel, mine),
        ("Noise", Noisy, fully_shard, mine),
        ("MasksOfParts", Ring, DistributedDataParallel, half),
        ("MasksOfWholes", Gathering, DistributedDataParallel, mine),
    ):
        model = wrap(kind(name, base, p=0.3))
        seeded(by_rank=False)
        train(model, rows)
    model = kind("MasksByHand", p=0.3)
    train(model, mine, reduced=everything)
    model = kind("MasksOfPartsByHand", Ring, p=0.3)
    train(model, half, reduced=everything)
    model = kind("MasksWithinColumns", Columns, scatters=True)
    train(model, same, reduced=replicated)
    train(DistributedDataParallel(kind("SameStream")), iter(DataLoader(Stream(split=False), ROWS)))
    train(planned("SplitShards"), shuffled(2))
    model = planned("MasksOfCopies", Late, p=0.3)
    seeded(by_rank=True)
    train(model, shuffled(1))
    train_and_evaluate(
        DistributedDataParallel(kind("OwnStatistics", Normalised), broadcast_buffers=False)
    )


def right() -> None:
    for name, base, wrap, rows in (
        ("Masks", Plain, DistributedDataParallel, mine),
        ("MasksOfFunctions", Functional, fully_shard, mine),
        ("MasksOfAttention", Attending, DistributedDataParallel, mine),
        ("Noise", Noisy, fully_shard, mine),
        ("MasksOfParts", Ring, DistributedDataParallel, half),
        ("NoiseOfItsOwn", Noisy, DistributedDataParallel, same),
        ("CutInside", Gathering, DistributedDataParallel, same),
    ):
        model = wrap(kind(name, base, p=0.3))
        seeded(by_rank=True)
        train(model, rows)
    model = kind("MasksByHand", p=0.3)
    seeded(by_rank=True)
    train(model, mine, reduced=everything)
    seeded(by_rank=False)
    train(kind("Memorised", p=0.3).train(), lambda _: DATA[:ROWS], reduced=everything)
    train(DistributedDataParallel(kind("MemorisedByAll", p=0.3)), lambda _: DATA[:ROWS])
    train(DistributedDataParallel(kind("Trial")), lambda _: torch.randn(ROWS, WIDTH))
    train(
        DistributedDataParallel(kind("TrialInPlace")), lambda _: torch.empty(ROWS, WIDTH).normal_()
    )
    train(
        DistributedDataParallel(kind("Conditioned")),
        lambda number: torch.full((1, WIDTH), float(number)),
    )
    train(kind("Alone", p=0.3), same)
    train(kind("Columns", Columns), same, reduced=replicated)
    train(kind("Scattered", Columns, scatters=True, forks=True), same, reduced=replicated)
    train(planned("Planned"), same)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"drop": SequenceParallel()}
    model = parallelize_module(kind("PlannedSequence", p=0.3), mesh, plan)
    model.drop.register_forward_hook(lambda _, __, output: output.full_tensor())
    train(model, lambda number: half(number))
    train(planned("Shards"), shuffled(1))
    model = planned("MasksOfColumns", p=0.3)
    seeded(by_rank=True)
    train(model, shuffled(1))
    seeded(by_rank=False)
    train(planned("MasksOfCopies", Late, p=0.3), shuffled(1))
    train_and_evaluate(DistributedDataParallel(kind("Statistics", Normalised)))
    model = DistributedDataParallel(kind("Averaged", Normalised), broadcast_buffers=False)
    train_and_evaluate(model, is_averaged=True)
    train(DistributedDataParallel(kind("Streamed")), iter(DataLoader(Stream(split=True), ROWS)))


def main() -> None:
    dist.init_process_group("gloo")
    {"wrong": wrong, "right": right}[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
