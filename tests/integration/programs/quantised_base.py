"""Trains low-rank updates of frozen 8-bit weights: with scale buffers, or a tensor subclass."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import return_and_correct_aliasing
from training_record import out_parser, seed_everything, write_record

aten = torch.ops.aten


class Int8Tensor(Tensor):
    """A matrix kept as 8-bit integers and one scale for each row."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "Int8Tensor":
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_, self.scale = data, scale

    @classmethod
    def of(cls, weight: Tensor) -> "Int8Tensor":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantised(self) -> Tensor:
        return self.data_.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride):
        return cls(inner["data_"], inner["scale"])

    def __repr__(self) -> str:
        return f"Int8Tensor(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (aten.detach.default, aten.clone.default, aten.alias.default):
            new = cls(function(args[0].data_), function(args[0].scale))
            return return_and_correct_aliasing(function, args, kwargs or {}, new)
        if function is aten.t.default:
            return args[0].dequantised().t()
        if function in (
            aten.mm.default,
            aten.addmm.default,
            aten.copy_.default,
            aten._to_copy.default,
        ):
            args = [a.dequantised() if isinstance(a, cls) else a for a in args]
            return function(*args, **(kwargs or {}))
        raise NotImplementedError(f"Int8Tensor has no {function}")


class Linear(nn.Module):
    """A frozen quantised layer and its update."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        self.way = way
        if way.startswith("subclass"):
            self.weight = nn.Parameter(Int8Tensor.of(weight), requires_grad=False)
        elif way == "parameter":
            scale = weight.abs().max() / 127
            self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
            self.register_buffer("scale", scale)
        else:
            scale = weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (weight / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)
        self.down = nn.Parameter(torch.randn(2, width) * 0.1)
        self.up = nn.Parameter(torch.zeros(width, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.way.startswith("subclass"):
            base = nn.functional.linear(inputs, self.weight)
        else:
            base = inputs @ (self.weight.float() * self.scale).T
        return base + inputs @ self.down.T @ self.up.T


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="buffers")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(3)
    model = nn.Sequential(Linear(16, args.way), nn.GELU(), Linear(16, args.way))
    if args.way.endswith("fsdp2"):
        frozen = {p for p in model.parameters() if not p.requires_grad}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, ignored_params=frozen)
        model = fully_shard(model, mesh=mesh, ignored_params=frozen)
    else:
        if args.way == "subclass":
            ignored = [name for name, p in model.named_parameters() if not p.requires_grad]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        model = DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    seed_everything(5 + dist.get_rank())
    losses = []
    for _ in range(5):
        inputs = torch.randn(6, 16)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    write_record(args.out, losses, weights)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
