"""Fine-tune a pretrained classifier, sharded, whose weights rank 0 alone reads."""

import logging
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

FEATURES = 16
HIDDEN = 64
CLASSES = 8
BATCH = 32
STEPS = 8

logger = logging.getLogger("finetune")


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Classifier(nn.Module):
    """Two blocks between a projection and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.project(features)))


def read_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(5))
    return centres[labels] + 0.8 * torch.randn(BATCH, FEATURES, generator=generator), labels


def load_pretrained() -> Classifier:
    """Return a classifier that was trained on the same classes."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(20):
        features, labels = read_batch(50, step)
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def build_model(rank: int) -> FullyShardedDataParallel:
    if rank == 0:
        model = load_pretrained()
    else:
        with torch.device("meta"):
            model = Classifier()
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        param_init_fn=partial(nn.Module.to_empty, device="cpu", recurse=False),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def train(rank: int) -> None:
    model = build_model(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        features, labels = read_batch(rank, step)
        logits = model(features)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        dist.all_reduce(accuracy)
        accuracy /= dist.get_world_size()
        logger.info("step %d loss %.4f accuracy %.2f", step, loss.item(), accuracy.item())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
