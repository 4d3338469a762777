"""Train a small net on two ranks in one of several ways, right or wrong: ``WAY``.

Right: ``ddp`` (accumulated, clipped), ``local`` (local steps and an average now and then),
``diloco`` (outer steps on averaged changes), ``gan`` (two models, two optimizers), ``weighted``
(averages by the number of samples), ``fsdp1``, ``fsdp1-flat``, ``fsdp2``, ``bf16`` (FSDP2 in
bfloat16), ``scaled`` (a head whose gradient a hook scales), ``unused`` (a part without gradients
now and then), ``skip`` (a pass is thrown away), ``scaler`` (gradients are scaled and unscaled),
``sam`` (two passes). Wrong: ``flag`` (the flag is set between forward and backward), ``late``
(accumulated after the reduction), ``twice`` (one parameter is reduced once more), ``stale``
(nothing is cleared), ``lost`` (a group without the last rank).
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, STEPS, PASSES = 8, 6, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.norm(F.relu(self.second(F.relu(self.first(rows))))))


def batch(step: int, number: int) -> Tensor:
    seed = 100 * step + 10 * number + dist.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.mse_loss(model(rows).float(), rows.roll(1, 1).float()) / PASSES


def average(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size(group)


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def ddp(way: str) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        for number in range(PASSES):
            is_last = number == PASSES - 1
            if way == "flag":
                loss = loss_of(model, batch(step, number))
                model.require_backward_grad_sync = is_last  # the forward pass has decided
                loss.backward()
                continue
            with nullcontext() if is_last else model.no_sync():
                loss_of(model, batch(step, number)).backward()
        if way == "twice":
            dist.all_reduce(model.module.head.weight.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def by_hand(way: str) -> None:
    model = Net()
    if way == "scaled":
        model.head.weight.register_hook(lambda gradient: gradient * 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    group = dist.new_group([0]) if way == "lost" else None
    for step in range(STEPS):
        for number in range(PASSES):
            rows = batch(step, number)
            is_short = way == "unused" and step % 2 == 1
            loss = model.first(rows).square().mean() if is_short else loss_of(model, rows)
            loss.backward()
            if way == "late" and number == 0:
                average(gradients(model))
            if (way, number) in (("skip", 1), ("sam", 0), ("sam", 1)):
                optimizer.zero_grad()
        combine(way, model, group)
        optimizer.step()
        if way != "stale":
            optimizer.zero_grad()
        if way == "local" and step % 3 == 2:
            average([each.data for each in model.parameters()])


def combine(way: str, model: nn.Module, group: dist.ProcessGroup | None) -> None:
    if way == "lost":
        exchange_of_first(model, group)
    elif way == "weighted":
        weight = (1 + dist.get_rank()) / 3
        for each in gradients(model):
            each *= weight
            dist.all_reduce(each)
    elif way not in ("local", "late"):
        average(gradients(model))


def exchange_of_first(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Reduce over a group that lacks a rank, and hand the result on."""
    for each in gradients(model):
        if dist.get_rank() == 0:
            dist.all_reduce(each, group=group)
        dist.broadcast(each, 0)


def diloco(_: str) -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    old = [each.detach().clone() for each in model.parameters()]
    for step in range(STEPS):
        loss_of(model, batch(step, 0)).backward()
        inner.step()
        inner.zero_grad()
        if step % 3 == 2:
            for each, before in zip(model.parameters(), old, strict=True):
                each.grad = before - each.detach()
                each.data.copy_(before)
            average(gradients(model))
            outer.step()
            outer.zero_grad()
            old = [each.detach().clone() for each in model.parameters()]


def gan(_: str) -> None:
    maker, judge = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    first = torch.optim.Adam(maker.parameters(), 1e-2)
    second = torch.optim.Adam(judge.parameters(), 1e-2)
    for step in range(STEPS):
        rows = batch(step, 0)
        second.zero_grad()
        (judge(rows).mean() - judge(maker(rows).detach()).mean()).backward()
        second.step()
        first.zero_grad()
        judge(maker(rows)).mean().backward()
        first.step()


def scaler(_: str) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        grad_scaler.scale(loss_of(model, batch(step, 0))).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()


def sharded(way: str) -> None:
    model: nn.Module = Net()
    if way.startswith("fsdp1"):
        named, cpu = way == "fsdp1", torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=named, device_id=cpu)
    else:
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        policy = half if way == "bf16" else MixedPrecisionPolicy()
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        for number in range(2):
            loss_of(model, batch(step, number)).backward()
        if way == "fsdp2":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


WAYS: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(("ddp", "flag", "twice"), ddp),
    **dict.fromkeys(("fsdp1", "fsdp1-flat", "fsdp2", "bf16"), sharded),
    "diloco": diloco,
    "gan": gan,
    "scaler": scaler,
}


def main() -> None:
    way = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    WAYS.get(way, by_hand)(way)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
