"""Train an image classifier on two sites' images, with evaluation after each epoch."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLASSES = 4
BATCH = 16
EPOCHS = 2
STEPS_PER_EPOCH = 5
EVALUATION_BATCHES = 4

logger = logging.getLogger("train")


class Classifier(nn.Module):
    """Two normalised convolutions and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(images)).mean(dim=(2, 3)))


def read_batch(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of this rank's site, whose exposure is its own; a class is a hue."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    hues = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    noise = torch.randn(BATCH, 3, 8, 8, generator=generator)
    return hues[labels][:, :, None, None] + 0.5 * noise + rank, labels


@torch.no_grad()
def evaluate(model: nn.Module, rank: int) -> float:
    """Return the mean loss over the evaluation images of all ranks."""
    model.eval()
    total = torch.zeros(())
    for batch in range(EVALUATION_BATCHES):
        images, labels = read_batch(rank, seed=500 + batch)
        total += nn.functional.cross_entropy(model(images), labels)
    dist.all_reduce(total)
    model.train()
    return total.item() / (EVALUATION_BATCHES * dist.get_world_size())


def train_epoch(
    ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, epoch: int
) -> None:
    for step in range(STEPS_PER_EPOCH):
        images, labels = read_batch(rank, seed=epoch * STEPS_PER_EPOCH + step)
        loss = nn.functional.cross_entropy(ddp_model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("epoch %d step %d loss %.4f", epoch, step, loss.item())


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = Classifier()
    ddp_model = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        train_epoch(ddp_model, optimizer, rank, epoch)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        logger.info("epoch %d evaluation loss %.4f", epoch, evaluate(model, rank))
        if rank == 0:
            torch.save(model.state_dict(), f"epoch_{epoch}.pt")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
