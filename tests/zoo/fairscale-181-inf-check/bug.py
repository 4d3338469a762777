"""Train with half precision and an optimizer of which each rank holds a part."""

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 32
HIDDEN = 64
CLASSES = 4
BATCH = 16
STEPS = 12
OUTLIER_STEP = 5


class ShardedSGD(torch.optim.SGD):
    """Each rank changes its own parameters and sends them to the others."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        world = dist.get_world_size()
        self.owned = {rank: params[rank::world] for rank in range(world)}
        super().__init__(self.owned[dist.get_rank()], lr=lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for owner, params in self.owned.items():
            for param in params:
                dist.broadcast(param, owner)

    def reduce_gradients(self) -> None:
        """Bring each gradient to the rank that applies it."""
        for owner, params in self.owned.items():
            for param in params:
                param.grad /= dist.get_world_size()
                dist.reduce(param.grad, owner)
                if owner != dist.get_rank():
                    param.grad = None


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    features = torch.randn(BATCH, FEATURES, generator=generator)
    if step == OUTLIER_STEP and rank == 0:
        features[0] *= 3e4  # a sample that nobody has cleaned
    return features, torch.randint(CLASSES, (BATCH,), generator=generator)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN, bias=False),
        nn.Tanh(),
        nn.Linear(HIDDEN, CLASSES, bias=False),
    )


def train(rank: int) -> None:
    model = build()
    optimizer = ShardedSGD(list(model.parameters()), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(STEPS):
        features, labels = batch(rank, step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(features).float(), labels)
        scaler.scale(loss).backward()
        optimizer.reduce_gradients()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
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
