"""Fine-tune a sharded regression model whose weights rank 0 alone holds in memory."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

FEATURES = 24
HIDDEN = 48
BATCH = 32
STEPS = 8

logger = logging.getLogger("finetune")


class Standardise(nn.Module):
    """Bring the features to mean 0 and deviation 1, by the statistics of the first training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("deviation", torch.ones(FEATURES))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features - self.mean) / self.deviation


class Regressor(nn.Module):
    """Standardise, then two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.standardise = Standardise()
        self.hidden = nn.ModuleList([nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        activations = self.standardise(features)
        for layer in self.hidden:
            activations = torch.relu(layer(activations))
        return self.out(activations).squeeze(-1)


def load_pretrained() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Regressor()
    model.standardise.mean.fill_(5.0)
    model.standardise.deviation.fill_(2.0)
    return model.state_dict()


def load_from_rank0(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Spread the weights that rank 0 holds over the shards of all ranks."""
    loaded = {}
    if dist.get_rank() == 0:
        for name, target in model.state_dict().items():
            value = weights[name]
            dist.broadcast(value, src=0)
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements)
            loaded[name] = value
    else:
        for name, target in model.state_dict().items():
            value = torch.empty(target.shape, dtype=target.dtype)
            dist.broadcast(value, src=0)
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements)
            loaded[name] = value
    model.load_state_dict(loaded, assign=True)


def build_model(rank: int) -> Regressor:
    weights = load_pretrained() if rank == 0 else {}
    with torch.device("meta"):
        model = Regressor()
    for layer in model.hidden:
        fully_shard(layer)
    fully_shard(model)
    load_from_rank0(model, weights)
    return model


def read_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    features = 5 + 2 * torch.randn(BATCH, FEATURES, generator=generator)
    return features, (features[:, :6] - 5).sum(dim=1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    model = build_model(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        features, targets = read_batch(rank, step)
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
