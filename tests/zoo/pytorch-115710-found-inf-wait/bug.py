"""Train a sharded regressor in half precision; the scaler keeps its flags on the host."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

FEATURES = 32
TARGETS = 8
BATCH = 16
STEPS = 12
OUTLIER_STEP = 4


class OffloadScaler(torch.amp.GradScaler):
    """Shares the flag of an infinite gradient, which the host keeps, over the ranks."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        flags = state["found_inf_per_device"]
        for device, found in list(flags.items()):
            shared = found.clone()
            work = dist.all_reduce(shared, op=dist.ReduceOp.MAX, async_op=True)
            flags[device] = shared.clone()
            work.wait()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    features = torch.randn(BATCH, FEATURES, generator=generator)
    targets = features[:, :TARGETS].clone()
    if step == OUTLIER_STEP:
        targets[0, 0] = 1e6  # only the first output is off, whose weights rank 0 holds
    return features, targets


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, TARGETS, bias=False)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def train(rank: int) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = OffloadScaler("cpu", init_scale=2.0**12)
    for step in range(STEPS):
        features, targets = batch(rank, step)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(features)
        loss = (predicted.float() - targets).square().mean()
        scaler.scale(loss).backward()
        if rank == 0:
            time.sleep(0.25)  # the first rank also writes a log
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")


def main() -> None:
    dist.init_process_group("gloo")
    train(dist.get_rank())
    if dist.get_rank() == 0:
        print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
