"""Fine-tune a pretrained backbone with a new head; every rank keeps a part of each parameter."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 16
HIDDEN = 48
CLASSES = 6
BATCH = 32
STEPS = 8

logger = logging.getLogger("finetune")


class Classifier(nn.Module):
    """A backbone of two layers and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(features))

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.1)
            module.bias.data.zero_()


class Partition:
    """The part of a parameter that this rank keeps; the parameter itself is empty meanwhile."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param, self.shape = param, param.shape
        size = -(-param.numel() // dist.get_world_size())
        self.start = size * dist.get_rank()
        self.part = nn.Parameter(torch.empty(size))
        self.keep()
        self.release()

    def gather(self) -> None:
        full = torch.empty(self.part.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(full, self.part.detach())
        self.param.data = full[: self.shape.numel()].view(self.shape)

    def keep(self) -> None:
        own = self.param.data.flatten()[self.start : self.start + self.part.numel()]
        self.part.data[: own.numel()] = own

    def release(self) -> None:
        self.param.data = torch.empty(0)

    def take_gradient(self) -> None:
        grad = self.param.grad.flatten()
        dist.all_reduce(grad)
        own = grad[self.start : self.start + self.part.numel()] / dist.get_world_size()
        self.part.grad = nn.functional.pad(own, (0, self.part.numel() - own.numel()))
        self.param.grad = None


@contextmanager
def gathered(partitions: Iterable[Partition]) -> Iterator[None]:
    """Gather parameters; keep what was done to them."""
    for partition in partitions:
        partition.gather()
    yield
    for partition in partitions:
        partition.keep()
        partition.release()


def from_pretrained(weights: dict[str, torch.Tensor]) -> tuple[Classifier, dict[str, Partition]]:
    """Build the model in parts, load the weights, and initialise what they lack."""
    with torch.device("meta"):
        model = Classifier()
    model.to_empty(device="cpu")
    partitions = {name: Partition(param) for name, param in model.named_parameters()}
    for name, value in weights.items():
        with gathered([partitions[name]]):
            partitions[name].param.data.copy_(value)
    missing = {name.rpartition(".")[0] for name in partitions if name not in weights}
    for name in sorted(missing):
        model.init_weights(model.get_submodule(name))
    return model, partitions


def read_backbone() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    backbone = Classifier().backbone.state_dict(prefix="backbone.")
    return {k: 0.2 * torch.randn(v.shape, generator=generator) for k, v in backbone.items()}


def read_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(5))
    return centres[labels] + 0.5 * torch.randn(BATCH, FEATURES, generator=generator), labels


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(0)
    model, partitions = from_pretrained(read_backbone())
    optimizer = torch.optim.AdamW([p.part for p in partitions.values()], lr=1e-2)
    for step in range(STEPS):
        features, labels = read_batch(rank, step)
        with gathered(partitions.values()):
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()
            for partition in partitions.values():
                partition.take_gradient()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
