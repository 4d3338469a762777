"""Train a multi-task model with one sharded adapter for each modality."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH = 32
STEPS = 12
LOG_EVERY = 3

logger = logging.getLogger("multitask")


class MultiModalModel(nn.Module):
    """A shared trunk, then the adapters of the modalities that the batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleDict(
            {"image": nn.Linear(WIDTH, WIDTH), "text": nn.Linear(WIDTH, WIDTH)}
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = {}
        for modality, features in sorted(batch.items()):
            hidden = torch.tanh(self.trunk(features))
            outputs[modality] = self.out(self.adapters[modality](hidden))
        return outputs


def read_batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Group the next samples of this rank's file by modality, in order of appearance."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    first, second = ("image", "text") if rank % 2 == 0 else ("text", "image")
    batch: dict[str, list[torch.Tensor]] = {}
    for modality in [first, second, second, first]:
        batch.setdefault(modality, []).append(torch.randn(WIDTH, generator=generator))
    return {modality: torch.stack(features) for modality, features in batch.items()}


def task_loss(batch: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Regress the mean of images and the first feature of texts."""
    image_target = batch["image"].mean(dim=1, keepdim=True)
    text_target = batch["text"][:, :1]
    image_loss = nn.functional.mse_loss(outputs["image"], image_target)
    return image_loss + nn.functional.mse_loss(outputs["text"], text_target)


def build_model() -> MultiModalModel:
    torch.manual_seed(0)
    model = MultiModalModel()
    for adapter in model.adapters.values():
        fully_shard(adapter)
    fully_shard(model)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        batch = read_batch(rank, step)
        loss = task_loss(batch, model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            logger.info("step %d loss %.6f", step, mean_loss.item() / dist.get_world_size())

    logger.info("training finished, last loss %.6f", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
