"""Resume a replicated model whose layers are updated and saved by one owning rank each."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
STEPS = 6
CHECKPOINTS = Path("checkpoints")

logger = logging.getLogger("resume")


class ModelChunk(nn.Module):
    """A stack of residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.out(hidden)

    def sync_parameters(self, owners: dict[str, int]) -> None:
        """Take each parameter from the rank that owns it."""
        for name, param in self.named_parameters():
            dist.broadcast(param.data, src=owners[name])


class OwnedAdam(torch.optim.AdamW):
    """Updates the parameters of one kind that this rank owns."""

    def __init__(self, named_params: dict[str, nn.Parameter], lr: float) -> None:
        self.names = list(named_params)
        super().__init__(named_params.values(), lr=lr)


class LayerWiseOptimizer:
    """Chains one optimizer for matrices and one for vectors, each over this rank's share."""

    def __init__(self, chunk: ModelChunk, lr: float) -> None:
        self.model_chunks = [chunk]
        self.params = dict(chunk.named_parameters())
        self.owners = {
            name: number // 2 % dist.get_world_size() for number, name in enumerate(self.params)
        }
        owned = {n: p for n, p in self.params.items() if self.owners[n] == dist.get_rank()}
        matrices = {name: param for name, param in owned.items() if param.ndim > 1}
        vectors = {name: param for name, param in owned.items() if param.ndim == 1}
        self.chained = [OwnedAdam(share, lr) for share in (matrices, vectors) if share]

    def step(self) -> None:
        """Update what this rank owns, then take the rest from its owners."""
        for optimizer in self.chained:
            optimizer.step()
        for chunk in self.model_chunks:
            chunk.sync_parameters(self.owners)
        for param in self.params.values():
            param.grad = None

    def save(self) -> None:
        """Write the parameters and the state of this rank's share."""
        CHECKPOINTS.mkdir(exist_ok=True)
        names = [name for optimizer in self.chained for name in optimizer.names]
        state = {
            "params": {name: self.params[name].detach() for name in names},
            "optimizers": [optimizer.state_dict() for optimizer in self.chained],
        }
        torch.save(state, CHECKPOINTS / f"rank{dist.get_rank()}.pt")

    def load(self) -> None:
        """Read this rank's share, then make the model whole on all ranks."""
        state = torch.load(CHECKPOINTS / f"rank{dist.get_rank()}.pt")
        for name, saved in state["params"].items():
            self.params[name].data.copy_(saved)
        for optimizer, saved in zip(self.chained, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for chunk in self.model_chunks:
            chunk.sync_parameters(self.owners)


def train(seed: int, resume: bool) -> None:
    """Train the model for some steps, and save it."""
    torch.manual_seed(0)
    chunk = ModelChunk()
    model = DistributedDataParallel(chunk)
    optimizer = LayerWiseOptimizer(chunk, lr=5e-3)
    if resume:
        optimizer.load()
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        inputs = torch.randn(64, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())
    optimizer.save()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    train(seed=rank, resume=False)
    logger.info("saved; going on from there")
    train(seed=2 + rank, resume=True)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
