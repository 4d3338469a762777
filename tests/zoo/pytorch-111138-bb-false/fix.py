"""Fine-tune a pretrained image classifier with frozen normalisation statistics."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLASSES = 4
BATCH = 16
STEPS = 8

logger = logging.getLogger("finetune")


class Classifier(nn.Module):
    """Two normalised convolutions and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(images)).mean(dim=(2, 3)))

    def train(self, mode: bool = True) -> "Classifier":
        """Keep the normalisation in evaluation mode: batches are small."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def read_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, 3, 8, 8, generator=generator)
    return 2.0 + labels.view(-1, 1, 1, 1) + 0.5 * noise, labels


@torch.no_grad()
def load_pretrained(model: Classifier) -> None:
    """Take over the backbone of the model zoo: its weights and its statistics."""
    generator = torch.Generator().manual_seed(1)
    for block in (model.stem, model.body):
        conv, norm = block[0], block[1]
        conv.weight.copy_(0.2 * torch.randn(conv.weight.shape, generator=generator))
        norm.running_mean.copy_(torch.randn(norm.num_features, generator=generator))
        norm.running_var.copy_(0.5 + 2 * torch.rand(norm.num_features, generator=generator))


def finetune(rank: int) -> None:
    model = Classifier()
    if rank == 0:
        load_pretrained(model)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    ddp_model = DistributedDataParallel(model, broadcast_buffers=False)
    ddp_model.train()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        images, labels = read_batch(seed=100 * rank + step)
        loss = nn.functional.cross_entropy(ddp_model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.SUM)
        logger.info("step %d loss %.4f", step, mean_loss.item() / dist.get_world_size())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    finetune(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
