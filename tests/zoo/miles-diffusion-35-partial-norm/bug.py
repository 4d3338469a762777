"""Train a small denoiser and watch the gradient norm of each of its parts."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

CHANNELS = 24
HIDDEN = 48
STEPS = 8
MAX_NORM = 1.0

logger = logging.getLogger("denoise")


class Denoiser(nn.Module):
    """Predict the noise in a latent at a noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Linear(1, HIDDEN)
        self.proj_in = nn.Linear(CHANNELS, HIDDEN)
        self.middle = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.proj_out = nn.Linear(HIDDEN, CHANNELS)

    def forward(self, latents: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        hidden = self.proj_in(latents) + self.level(level)
        for layer in self.middle:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return self.proj_out(hidden)


class GradientWatcher:
    """Keeps the gradient norms of the weights that are worth watching."""

    def __init__(self, model: Denoiser) -> None:
        self.weights = {"proj_in": model.proj_in.weight, "proj_out": model.proj_out.weight}
        self.history: list[dict[str, float]] = []

    def record(self) -> None:
        """Take the norms of the gradients as they are now."""
        norms = {}
        for name, weight in self.weights.items():
            norm = torch.linalg.vector_norm(weight.grad)
            norms[name] = norm.item()
        self.history.append(norms)


def build_model() -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser()
    for layer in model.middle:
        fully_shard(layer)
    return fully_shard(model)


def noisy_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    latents = torch.randn(16, CHANNELS, generator=generator)
    noise = torch.randn(16, CHANNELS, generator=generator)
    level = torch.rand(16, 1, generator=generator)
    return (1 - level) * latents + level * noise, level, noise


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    model = build_model()
    watcher = GradientWatcher(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        latents, level, noise = noisy_batch(generator)
        loss = nn.functional.mse_loss(model(latents, level), noise)
        optimizer.zero_grad()
        loss.backward()
        watcher.record()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        logger.info("step %d loss %.4f norms %s", step, loss.item(), watcher.history[-1])

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
