"""Trains one network under DDP with each of its options, and evaluates on each rank in between."""

import contextlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

ACCUMULATE = 2

OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "default": {},
    "every pass is reduced": {},
    "own statistics": {"broadcast_buffers": False},
    "unused head": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "nothing sent at the start": {"init_sync": False},
}


class Network(nn.Module):
    """Convolutions with batch normalisation, and a head that may stay unused for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(16, 3)
        self.unused_head = nn.Linear(16, 3)

    def forward(self, images: Tensor, *, all_heads: bool) -> Tensor:
        features = self.body(images)
        logits = self.head(features)
        return logits + self.unused_head(features) if all_heads else logits


def network() -> Network:
    seed_everything(11)
    return Network().to(memory_format=torch.channels_last)


def backward(model: DistributedDataParallel, *, all_heads: bool, may_wait: bool) -> list[float]:
    """Accumulate gradients; with `may_wait` they are reduced in the last pass only."""
    losses = []
    for micro in range(ACCUMULATE):
        is_local = may_wait and micro < ACCUMULATE - 1
        with model.no_sync() if is_local else contextlib.nullcontext():
            logits = model(torch.randn(4, 1, 6, 6), all_heads=all_heads)
            loss = nn.functional.cross_entropy(logits, torch.randint(0, 3, (4,)))
            (loss / ACCUMULATE).backward()
        losses.append(loss.item())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return losses


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Evaluate on as many samples as this rank has."""
    model.eval()
    scores = model(torch.randn(3 + dist.get_rank(), 1, 6, 6), all_heads=True)
    model.train()
    return scores.mean().item()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    models = {name: DistributedDataParallel(network(), **OPTIONS[name]) for name in OPTIONS}
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models.values()
    ]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in optimizers]
    seed_everything(30 + dist.get_rank())
    losses = []
    for step in range(4):
        for name, model in models.items():
            losses += backward(
                model,
                all_heads=name != "unused head",
                may_wait=name not in ("static graph", "every pass is reduced"),
            )
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        for buffer in models["own statistics"].buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()
        losses += [evaluate(model.module) for model in models.values()]
        if dist.get_rank() == 0:
            print(f"step {step} loss {losses[-1]:.4f}")
    write_record(args.out, losses, {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
