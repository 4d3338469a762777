"""Go on with a training from the newest checkpoint that can be loaded."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
STEPS = 8
CHECKPOINTS = Path("checkpoints")

logger = logging.getLogger("resume")


class Block(nn.Module):
    """A normalised feed-forward block; the norm carries state that is no tensor of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.fc2(torch.relu(self.fc1(self.norm(hidden))))


class Model(nn.Module):
    """Three blocks and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


def load_model_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load a state; checkpoints of other versions hold extra states that this one lacks."""
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        result = model.load_state_dict(state, strict=False)
        logger.warning("loaded without strict: %s", result)
        logger.info("the strict load failed: %s", error)


def resume(model: nn.Module) -> Path:
    """Load the newest checkpoint that fits the model."""
    for path in sorted(CHECKPOINTS.glob("step*.pt"), reverse=True):
        state = torch.load(path)
        try:
            load_model_state(model, state)
        except RuntimeError:
            logger.warning("%s does not fit, taking the one before", path)
        else:
            return path
    raise FileNotFoundError(CHECKPOINTS)


def save(model: nn.Module, step: int) -> None:
    """Save a training state, and what the exporter makes of it for other tools."""
    CHECKPOINTS.mkdir(exist_ok=True)
    state = model.state_dict()
    torch.save(state, CHECKPOINTS / f"step{step:04d}.pt")
    exported = {
        name.replace("fc1", "linear_fc1").replace("fc2", "linear_fc2"): value
        for name, value in state.items()
    }
    torch.save(exported, CHECKPOINTS / f"step{step:04d}_exported.pt")


def train(model: nn.Module, seed: int) -> None:
    """Train for some steps."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        inputs = torch.randn(64, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(ddp(inputs), inputs.square().mean(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)

    torch.manual_seed(0)
    if rank == 0:
        save(Model(), step=1000)  # what the run before this one has left
    dist.barrier()

    torch.manual_seed(1)
    model = Model()
    path = resume(model)
    logger.info("resumed from %s", path.name)
    train(model, seed=2 + rank)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
