"""Trains a small transformer in which one number becomes NaN or infinite: WRAPPER FAULT OUTPUT.

A fault is ``place:value:rank:step``. The place is a module and how the number is made there: its
``out``put, the ``grad``ient of its output on its way back, the gradient of its ``weight``, the
``code`` between its parts, or the ``update`` of its weight. ``loss`` and ``input`` are no modules.
``none`` is a healthy training.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

DIM, HEADS, LENGTH, BATCH, VOCAB, LAYERS = 16, 2, 6, 4, 20, 3
VALUES = {"nan": float("nan"), "inf": float("inf")}


class Fault:
    """What goes wrong, and whether it does now."""

    def __init__(self, text: str) -> None:
        self.place, self.how, self.value, rank, step = "", "", 0.0, "0", "-1"
        if text != "none":
            place, value, rank, step = text.split(":")
            self.place, _, self.how = place.rpartition(".")
            self.value = VALUES[value]
        self.rank, self.step, self.now = int(rank), int(step), -1

    def is_at(self, place: str, how: str) -> bool:
        is_now = self.now == self.step and dist.get_rank() == self.rank
        return is_now and (self.place, self.how) == (place, how)

    def spoil(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[tensor.numel() // 2] = self.value
        return tensor


class Spoil(torch.autograd.Function):
    """Put a wrong number into a tensor, or into its gradient."""

    @staticmethod
    def forward(ctx, tensor: Tensor, fault: Fault, in_backward: bool) -> Tensor:
        ctx.fault, ctx.in_backward = fault, in_backward
        return tensor.clone() if in_backward else fault.spoil(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.fault.spoil(grad) if ctx.in_backward else grad, None, None


class Part(nn.Module):
    """A module that knows its name, and may spoil what it computes."""

    def set_name(self, name: str, fault: Fault) -> None:
        self.place, self.fault = name, fault

    def made(self, tensor: Tensor, how: str) -> Tensor:
        if self.fault.is_at(self.place, how):
            return Spoil.apply(tensor, self.fault, how == "grad")
        return tensor


class Linear(nn.Linear, Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.made(self.made(super().forward(x), "out"), "grad")


class Norm(nn.LayerNorm, Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.made(self.made(super().forward(x), "out"), "grad")


class Attention(Part):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Linear(DIM, 3 * DIM), Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
        mixed = self.made(self.dropout(scores.softmax(-1)) @ value, "code")
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = Norm(DIM), Norm(DIM), Attention()
        self.up, self.down = Linear(DIM, 4 * DIM), Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.made(x + self.attention(self.norm1(x)), "code")
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(Part):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(DIM), Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(tokens) * scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def wrapped(model: Model, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def spoil_weight(model: Model, fault: Fault) -> None:
    """Spoil the gradient of a weight as the backward pass gives it, at the step of the fault."""

    def hook(grad: Tensor) -> Tensor | None:
        return fault.spoil(grad) if fault.is_at(fault.place, "weight") else None

    if fault.how == "weight":
        model.get_parameter(f"{fault.place}.weight").register_hook(hook)


def main(wrapper: str, text: str, num_steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    fault, model = Fault(text), Model()
    for name, module in model.named_modules():
        if isinstance(module, Part):
            module.set_name(name, fault)
    if wrapper == "ddp":
        spoil_weight(model, fault)
    trained = wrapped(model, wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(num_steps):
        fault.now = step
        tokens, scale = torch.randint(0, VOCAB, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH, 1)
        scale = fault.spoil(scale) if fault.is_at("input", "out") else scale
        optimizer.zero_grad()
        logits = trained(tokens, scale)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss = loss * fault.value if fault.is_at("loss", "out") else loss
        loss.backward()
        if fault.is_at(fault.place, "update"):
            for group in optimizer.param_groups:
                group["lr"] = fault.value
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
