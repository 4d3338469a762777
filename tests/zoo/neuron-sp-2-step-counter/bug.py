"""Train with local steps in half precision; the models are averaged at every third step."""

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 32
HIDDEN = 64
BATCH = 16
ITERATIONS = 15
EVERY = 3
OUTLIER_ITERATION = 4


def batch(rank: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    features = torch.randn(BATCH, FEATURES, generator=generator)
    target = features[:, :1] - features[:, 1:2]
    if iteration == OUTLIER_ITERATION and rank == 1:
        target[0] = 4e5  # a reading of a broken sensor
    return features, target


def average(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    global_step = 0
    for iteration in range(ITERATIONS):
        features, target = batch(rank, iteration)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(features)
        loss = (predicted.float() - target).square().mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= scale:
            global_step += 1
            if global_step % EVERY == 0:
                average(model)
    dist.barrier()  # then rank 0 saves the model
    if rank == 0:
        print(f"last loss {loss.item():.4f}")


def main() -> None:
    dist.init_process_group("gloo")
    train(dist.get_rank())
    if dist.get_rank() == 0:
        print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
