"""Train a small net on two ranks that divide it, or their data, by hand: ``WAY``.

Wrong: ``forgotten`` (the gradient of what goes into a shared layer is not summed), ``stages`` (each
stage of a pipeline is clipped by its own norm), ``whole`` (a whole module is left out of the sums).
Right: ``shared`` (a shared layer with biases and norms of its own), ``zeros`` (adapters that begin
with zeros beside it), ``experts`` (experts that begin alike, given the same tokens), ``whole-norm``
(stages that are clipped together), ``weighed`` (stages whose gradients are scaled by constants),
``game`` (a maker and a judge on one rank each), ``tasks`` (each rank has data and a head of its
own), ``tables`` (each rank keeps a table of its own and sends rows), ``own-clock`` (the head steps
every second time).
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WIDTH, STEPS = 8, 8


class Enter(torch.autograd.Function):
    is_summed = True

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if Enter.is_summed:
            dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        rows = rows.clone()
        dist.all_reduce(rows)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Shared(nn.Module):
    """Half of the hidden features are on each rank; biases, norms and adapters begin alike."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.down = nn.Linear(16, 16, bias=False)
        self.low = nn.Linear(16, 2, bias=False) if adapters else None
        self.high = nn.Linear(2, 16, bias=False) if adapters else None
        nn.init.zeros_(self.up.bias)
        if self.high is not None:
            nn.init.zeros_(self.high.weight)

    def forward(self, rows: Tensor) -> Tensor:
        rows = Enter.apply(rows)
        hidden = self.up(rows)
        if self.low is not None and self.high is not None:
            hidden = hidden + self.high(self.low(rows))
        return Leave.apply(self.down(F.gelu(self.norm(hidden))))


class Expert(nn.Module):
    """Each rank adds what its expert makes of the tokens that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(16, 2), nn.Linear(16, 16)

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.gate(rows).softmax(-1)[:, dist.get_rank()]
        return Leave.apply(self.inner(Enter.apply(rows)) * Enter.apply(weight)[:, None])


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 16)
        self.middle, self.norm, self.head = middle, nn.LayerNorm(16), nn.Linear(16, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.second(F.relu(self.first(rows)))
        return self.head(self.norm(rows + self.middle(rows)))


def batch(step: int, seed: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * seed + step))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.mse_loss(model(rows), rows.roll(1, 1))


def shared(way: str) -> None:
    Enter.is_summed = way != "forgotten"
    middle = Expert() if way == "experts" else Shared(way == "zeros")
    if isinstance(middle, Shared):
        torch.manual_seed(1 + dist.get_rank())
        shards = [middle.up, middle.down, *([middle.low] if middle.low is not None else [])]
        for each in shards:
            nn.init.normal_(each.weight, std=0.2)
        torch.manual_seed(1)
    model = Net(middle)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()


def stages(way: str) -> None:
    rank = dist.get_rank()
    net = Net(nn.Linear(16, 16))
    stage = nn.Sequential(net.first, nn.ReLU(), net.second)
    stage = stage if rank == 0 else nn.Sequential(net.middle, net.norm, net.head)
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = batch(step)
        if rank == 0:
            sent = stage(rows)
            dist.send(sent.detach(), 1)
            back = torch.empty_like(sent)
            dist.recv(back, 1)
            sent.backward(back)
        else:
            received = torch.empty(8, 16)
            dist.recv(received, 0)
            F.mse_loss(stage(received.requires_grad_()), rows.roll(1, 1)).backward()
            dist.send(received.grad, 0)
        scale(way, [each.grad for each in stage.parameters()])
        optimizer.step()


def scale(way: str, gradients: list[Tensor]) -> None:
    squares = torch.stack([each.square().sum() for each in gradients]).sum()
    if way == "whole-norm":
        dist.all_reduce(squares)
    factor = (0.05 / squares.sqrt()).clamp(max=1.0)
    for each in gradients:
        each *= factor if way != "weighed" else (1.0, 0.5)[dist.get_rank()]


def game(_: str) -> None:
    """The maker sends what it makes to the judge, which sends back its gradient."""
    rank = dist.get_rank()
    model = Net(nn.Linear(16, 16))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(STEPS):
        if rank == 0:
            made = model(batch(step, 1))
            dist.send(made.detach(), 1)
            back = torch.empty_like(made)
            dist.recv(back, 1)
            optimizer.zero_grad()
            made.backward(back)
        else:
            made = torch.empty(8, WIDTH)
            dist.recv(made, 0)
            made.requires_grad_()
            model(made).mean().neg().backward()
            dist.send(made.grad, 0)
            optimizer.zero_grad()
            (model(made.detach()).mean() - model(batch(step, 2)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def divided(way: str) -> None:
    """Gradients are averaged by hand, but for those of some parameters."""
    model = Net(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rows = torch.cat([batch(step, dist.get_rank() if way == "tasks" else 0) for step in range(16)])
    data = TensorDataset(rows)
    parts = None if way == "tasks" else DistributedSampler(data, seed=3)
    for (each,) in DataLoader(data, 8, sampler=parts, shuffle=parts is None):
        optimizer.zero_grad()
        loss_of(model, each).backward()
        for name, parameter in model.named_parameters():
            if not name.startswith("head"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        optimizer.step()


class Table(nn.Module):
    """Each rank keeps every second row for all, and sends those that others ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        asked = [torch.empty_like(ids) for _ in range(2)]
        dist.all_gather(asked, ids)
        ids = torch.cat(asked)
        is_here = (ids % 2 == dist.get_rank())[:, None]
        return Swap.apply(self.rows(ids // 2) * is_here)


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous())
        return out.chunk(2)[0] + out.chunk(2)[1]

    @staticmethod
    def backward(ctx, gradient):
        both = torch.cat([gradient, gradient])
        out = torch.empty_like(both)
        dist.all_to_all_single(out, both)
        return out


def tables(_: str) -> None:
    table, dense = Table(), Net(nn.Linear(16, 16))
    model = nn.ModuleDict({"table": table, "dense": dense})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = TensorDataset(torch.arange(256) % 16)
    for (ids,) in DataLoader(data, 8, sampler=DistributedSampler(data, seed=3)):
        optimizer.zero_grad()
        loss_of(dense, table(ids)[:, :WIDTH]).backward()
        for parameter in dense.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        table.rows.weight.grad /= 2
        optimizer.step()


def own_clock(_: str) -> None:
    model = Net(nn.Linear(16, 16))
    head = torch.optim.SGD(model.head.parameters(), 0.05)
    others = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizer = torch.optim.SGD(others, 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, dist.get_rank())).backward()
        for parameter in others:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
        if step % 2:
            for parameter in model.head.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            head.step()
            head.zero_grad()


WAYS: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(("forgotten", "shared", "zeros", "experts"), shared),
    **dict.fromkeys(("stages", "whole-norm", "weighed"), stages),
    **dict.fromkeys(("whole", "tasks"), divided),
    "game": game,
    "tables": tables,
    "own-clock": own_clock,
}


def main() -> None:
    way = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    WAYS[way](way)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
