"""Trains with one of the usual ways of clipping, `--way`, and a scheduler."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training_record import out_parser, seed_everything, write_record

DIM = 8


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, 1))


def probe() -> nn.Sequential:
    """Return a frozen network with one trainable matrix on top."""
    model = network().requires_grad_(False)
    model[2] = nn.Linear(2 * DIM, 4, bias=False)
    return model


def scalar() -> nn.Sequential:
    """Return a frozen network of which one number is trained."""
    model = network().requires_grad_(False)
    model[2].bias.requires_grad_(True)
    return model


def shard(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def by_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


def by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 1e-3)


def by_layer(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            clip_grad_norm_(layer.parameters(), 0.1)


def by_hand(model: nn.Module) -> None:
    """Clip shards by the norm over all of them."""
    shards = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    squares = torch.stack([shard.square().sum() for shard in shards]).sum()
    dist.all_reduce(squares)
    for each in shards:
        each.mul_(torch.clamp(0.1 / (squares.sqrt() + 1e-6), max=1.0))


def by_items(model: nn.Module) -> None:
    """Clip by the norm as well, and take each rank's part of it as a number first."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = torch.tensor(sum(gradient.square().sum().item() for gradient in gradients))
    dist.all_reduce(squares)
    for gradient in gradients:
        gradient.mul_(min(0.1 / (squares.sqrt().item() + 1e-6), 1.0))


def after_averaging(model: nn.Module) -> None:
    """Average the gradients, which DDP has left alone, then clip."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    by_norm(model)


def after_sparsifying(model: nn.Module) -> None:
    """Keep the gradients of half the rows only, as structured pruning does, then clip."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            rows = torch.arange(parameter.shape[0]) < max(1, parameter.shape[0] // 2)
            first = dist.get_rank() * len(parameter.grad.to_local())
            part = rows[first : first + len(parameter.grad.to_local())]
            parameter.grad.to_local()[~part] = 0
    by_norm(model)


Build = Callable[[], nn.Module]
Clip = Callable[[nn.Module], None]
WAYS: dict[str, tuple[Build, Clip]] = {
    "norm-ddp": (lambda: DistributedDataParallel(network()), by_norm),
    "norm-fsdp2": (lambda: shard(network()), by_norm),
    "hand-fsdp2": (lambda: shard(network()), by_hand),
    "items-fsdp2": (lambda: shard(network()), by_items),
    "layer-fsdp2": (lambda: shard(network()), by_layer),
    "value-fsdp2": (lambda: shard(network()), by_value),
    "value-probe": (lambda: shard(probe()), by_value),
    "sparse-probe": (lambda: shard(probe()), after_sparsifying),
    "late-ddp": (lambda: DistributedDataParallel(network()), after_averaging),
    "late-probe": (lambda: DistributedDataParallel(probe()), after_averaging),
    "late-scalar": (lambda: DistributedDataParallel(scalar()), after_averaging),
}


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=WAYS, default="norm-fsdp2")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(15)
    build, clip = WAYS[args.way]
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:1], "lr": 1e-3}, {"params": trained[1:]}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    seed_everything(34 + dist.get_rank())
    losses = []
    for _ in range(5):
        # Batches that differ much between ranks, as long sequences and short ones do.
        inputs = torch.randn(6, DIM) * (1 + 9 * dist.get_rank())
        if clip is after_averaging:
            with model.no_sync():
                loss = loss_of(model, inputs)
                loss.backward()
        else:
            loss = loss_of(model, inputs)
            loss.backward()
        clip(model)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"{args.way} loss {losses[-1]:.4f}")
    write_record(args.out, losses, {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
