"""Trains models with unusual parameters and buffers under DDP and FSDP2, all of them correct."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from training_record import out_parser, seed_everything, write_record

DIM = 8


class Quantised(nn.Module):
    """A frozen linear layer of 8-bit weights."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(DIM, DIM)
        self.register_buffer("scale", weight.abs().amax() / 127)
        self.register_buffer("codes", (weight / self.scale).round().to(torch.int8))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.codes.to(hidden.dtype) * self.scale.to(hidden.dtype))


class Odd(nn.Module):
    """Normed weights, attention, padding, and buffers of all kinds."""

    def __init__(self, *, for_ddp: bool) -> None:
        super().__init__()
        self.quantised = Quantised()
        self.embed = nn.Embedding(12, DIM, padding_idx=0, sparse=for_ddp)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(DIM, DIM))
        self.spectral = parametrizations.spectral_norm(nn.Linear(DIM, DIM))
        self.recurrent = nn.LSTM(DIM, DIM, batch_first=True)
        self.lazy = nn.LazyLinear(1)
        self.gain = nn.Parameter(torch.ones(1) if not for_ddp else torch.ones(()))
        self.filter = nn.Parameter(torch.randn(DIM, dtype=torch.complex64) / DIM)
        self.register_buffer("mask", torch.ones(DIM, DIM, dtype=torch.bool).tril())
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("later", None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("turned", torch.randn(3, DIM).t(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        hidden = self.quantised(self.embed(tokens))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = torch.relu(self.spectral(self.normed(hidden)))
        hidden = torch.fft.ifft(torch.fft.fft(hidden) * self.filter).real
        hidden = hidden + self.recurrent(hidden)[0] * self.gain
        return self.lazy(hidden)


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = checkpoint_wrapper(nn.Linear(DIM, DIM))
        self.second = nn.Linear(DIM, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(hidden))
        return checkpoint(self.second, hidden, use_reentrant=False)


def build_models() -> list[nn.Module]:
    seed_everything(18)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.ones(1, 3, dtype=torch.long)
    models = []
    for for_ddp in (True, False):
        model = Odd(for_ddp=for_ddp)
        model(tokens)  # gives the lazy layer its shape
        if for_ddp:
            models.append(DistributedDataParallel(model))
            continue
        # Complex numbers and parameters of no dimension cannot be sharded.
        models.append(fully_shard(model, mesh=mesh, ignored_params={model.filter}))
    return models


def train(models: list[nn.Module], small: list[nn.Module]) -> list[float]:
    ignored = models[1].filter
    everything = [*models, *small]
    optimizers = []
    for model in everything:
        rest = [p for p in model.parameters() if p is not ignored]
        optimizers.append(torch.optim.SGD(rest, lr=1e-2, foreach=False))
    seed_everything(37 + dist.get_rank())
    losses = []
    for step in range(5):
        tokens = torch.randint(0, 12, (3, 6))
        hidden = torch.randn(4, DIM)
        for model in everything:
            dtype = next(model.parameters()).dtype
            output = model(tokens) if model in models else model(hidden.to(dtype))
            loss = output.float().square().mean()
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ignored.grad = None
        if step == 1:
            # A model that comes later, in place of another one.
            seed_everything(19)
            everything[-1] = DistributedDataParallel(Checkpointed())
            optimizers[-1] = torch.optim.SGD(everything[-1].parameters(), lr=1e-2)
            seed_everything(38 + dist.get_rank())
    return losses


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    models = build_models()
    waiting = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
    with torch.device("meta"):
        counted = nn.TransformerEncoderLayer(DIM, 2, DIM)
    num_weights = sum(parameter.numel() for parameter in counted.parameters())
    small = [
        DistributedDataParallel(Checkpointed().bfloat16()),
        fully_shard(Checkpointed().half(), mesh=init_device_mesh("cpu", (2,))),
        DistributedDataParallel(Checkpointed().double()),
    ]
    losses = train(models, small)
    losses.append(waiting(torch.ones(2, 3)).mean().item())
    if dist.get_rank() == 0:
        print(f"{num_weights} weights, loss {losses[-2]:.4f}")
    write_record(args.out, losses, {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
