"""Fine-tune a small denoiser behind a sharded engine, with checkpoints on the way."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LATENT_DIM = 32
STEPS = 10
CHECKPOINT_EVERY = 4

logger = logging.getLogger("tuner")


class Denoiser(nn.Module):
    """Predict the noise in a latent."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(LATENT_DIM, 64)
        self.mid = nn.Linear(64, 64)
        self.up = nn.Linear(64, LATENT_DIM)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.down(latent))
        return self.up(hidden + torch.nn.functional.silu(self.mid(hidden)))


class ShardedEngine:
    """Hold a sharded model and its optimizer, and step and save them as one."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        fully_shard(model.mid)
        fully_shard(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_checkpoint(self, folder: Path) -> None:
        """Write this rank's shard of the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        shards = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in self.model.state_dict().items()
        }
        torch.save(shards, folder / f"shard-{dist.get_rank()}.pt")
        dist.barrier()


def noisy_latents(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    latent = torch.randn(8, LATENT_DIM, generator=generator)
    noise = torch.randn(8, LATENT_DIM, generator=generator)
    return latent + 0.5 * noise, noise


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_main_process = rank == 0
    logging.basicConfig(level=logging.INFO if is_main_process else logging.WARNING)

    torch.manual_seed(0)
    engine = ShardedEngine(Denoiser(), lr=2e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        noisy, noise = noisy_latents(generator)
        loss = nn.functional.mse_loss(engine.model(noisy), noise)
        engine.step(loss)
        if is_main_process:
            logger.info("step %d loss %.4f", step, loss.item())
            if step % CHECKPOINT_EVERY == 0:
                engine.save_checkpoint(Path("checkpoints") / f"step-{step}")
                logger.info("saved the checkpoint of step %d", step)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
