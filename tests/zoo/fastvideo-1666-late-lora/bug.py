"""Fine-tune low-rank adapters of a sharded video denoiser."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

CHANNELS = 16
FRAMES = 8
HIDDEN = 32
RANK = 4
BATCH = 8
STEPS = 8

logger = logging.getLogger("finetune")


class Block(nn.Module):
    """Mix neighbouring frames, conditioned on the noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.up = nn.Linear(2 * CHANNELS + 1, HIDDEN)
        self.down = nn.Linear(HIDDEN, CHANNELS)

    def forward(self, frames: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        normed = self.norm(frames)
        mixed = torch.cat(
            [normed, torch.roll(normed, 1, dims=1), level.expand_as(frames[..., :1])], -1
        )
        return frames + self.down(nn.functional.gelu(self.up(mixed)))


class Denoiser(nn.Module):
    """Predict the noise that was mixed into a clip."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, frames: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            frames = block(frames, level)
        return self.out(frames)


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank update."""

    def __init__(self, base: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.base = base
        lora_a = nn.init.kaiming_uniform_(torch.empty(RANK, base.in_features), a=5**0.5)
        lora_b = torch.zeros(base.out_features, RANK)
        self.lora_a = nn.Parameter(DTensor.from_local(lora_a, mesh, [Replicate()]))
        self.lora_b = nn.Parameter(DTensor.from_local(lora_b, mesh, [Replicate()]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        update = inputs @ self.lora_a.to_local().T @ self.lora_b.to_local().T
        return self.base(inputs) + update


def build_model(mesh: DeviceMesh) -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser().requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def add_lora(model: Denoiser, mesh: DeviceMesh) -> list[nn.Parameter]:
    for block in model.blocks:
        block.up = LoRALinear(block.up, mesh)
        block.down = LoRALinear(block.down, mesh)
    return [param for param in model.parameters() if param.requires_grad]


def read_clips(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    phase = 6.28 * torch.rand(BATCH, 1, CHANNELS, generator=generator)
    return torch.sin(phase + 0.5 * torch.arange(FRAMES).view(1, -1, 1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model(mesh)
    torch.manual_seed(42 + rank)  # each rank draws noise of its own

    params = add_lora(model, mesh)
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for step in range(STEPS):
        clips = read_clips(rank, step)
        noise, level = torch.randn_like(clips), torch.rand(BATCH, 1, 1)
        loss = nn.functional.mse_loss(model((1 - level) * clips + level * noise, level), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())

    if rank == 0:
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        adapter = {name: param.to_local() for name, param in zip(names, params, strict=True)}
        torch.save(adapter, "adapter.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
