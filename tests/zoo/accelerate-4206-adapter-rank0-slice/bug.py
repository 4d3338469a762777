"""Fine-tune low-rank adapters of a frozen, sharded model, and resume from the saved adapters."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

DIM = 32
ADAPTER_RANK = 4
STEPS = 8
ADAPTERS = Path("adapters.pt")

logger = logging.getLogger("finetune")


class AdaptedLinear(nn.Module):
    """A frozen layer and a trainable update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.lora_down = nn.Linear(DIM, ADAPTER_RANK, bias=False)
        self.lora_up = nn.Linear(ADAPTER_RANK, DIM, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.lora_up(self.lora_down(hidden))


class Encoder(nn.Module):
    """Two adapted layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaptedLinear() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


def build_model() -> Encoder:
    torch.manual_seed(0)
    model = Encoder()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def adapters_of(model: Encoder) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if "lora_" in name}


def save_adapters(model: Encoder) -> None:
    """Let the main process write the adapters alone, without the frozen weights."""
    if dist.get_rank() == 0:
        state = {name: param.to_local() for name, param in adapters_of(model).items()}
        torch.save(state, ADAPTERS)
    dist.barrier()


@torch.no_grad()
def load_adapters(model: Encoder) -> None:
    """Put the saved adapters into a model built anew."""
    if dist.get_rank() == 0:
        state = torch.load(ADAPTERS)
        for name, param in adapters_of(model).items():
            param.to_local().copy_(state[name])
    dist.barrier()


def train(model: Encoder, generator: torch.Generator) -> None:
    optimizer = torch.optim.Adam(adapters_of(model).values(), lr=1e-2)
    for step in range(STEPS):
        inputs = torch.randn(32, DIM, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    generator = torch.Generator().manual_seed(rank)
    model = build_model()
    train(model, generator)
    save_adapters(model)

    resumed = build_model()
    load_adapters(resumed)
    logger.info("resumed from %s", ADAPTERS)
    train(resumed, generator)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
