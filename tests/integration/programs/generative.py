"""Trains generators: a VAE, diffusion with noise drawn in several ways, and a sharded GAN."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_record import out_parser, seed_everything, write_record

WIDTH, BATCH, LEVELS = 8, 8, 20


class Vae(nn.Module):
    """An encoder, a reparameterised sample and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(inputs).chunk(2, dim=-1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(sample), mean, log_variance


class Denoiser(nn.Module):
    """Predicts the noise of a sample at a level, with a sinusoidal embedding of the level."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.99, 0.05, LEVELS))
        self.inner = nn.Sequential(nn.Linear(WIDTH + 4, 32), nn.SiLU(), nn.Dropout(0.1))
        self.outer = nn.Linear(32, WIDTH)

    def forward(self, noised: Tensor, level: Tensor) -> Tensor:
        angles = level[:, None] * torch.tensor([math.pi / LEVELS, 4 * math.pi / LEVELS])
        embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
        return self.outer(self.inner(torch.cat([noised, embedding], dim=1)))


def loader() -> DataLoader:
    samples = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(samples)
    return DataLoader(
        dataset, batch_size=BATCH, sampler=DistributedSampler(dataset), drop_last=True
    )


def train_vae(losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(Vae())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seed_everything(100 + dist.get_rank())
    batches = loader()
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for (inputs,) in batches:
            decoded, mean, log_variance = model(inputs)
            recon = nn.functional.mse_loss(decoded, inputs, reduction="sum") / len(inputs)
            kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp()) / len(inputs)
            loss = recon + 0.1 * kl
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.module


def drawn(way: str, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return noise and levels for the samples of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if way == "diffusion-global-seed":  # every rank draws for all, and takes its part
        noise = torch.randn(world * BATCH, WIDTH)
        level = torch.randint(0, LEVELS, (world * BATCH,))
        return noise[rank * BATCH :][:BATCH], level[rank * BATCH :][:BATCH]
    if way == "diffusion-offset":  # one seed, plus the position of the samples in the data
        first = (step * world + rank) * BATCH
        noises, levels = [], []
        for index in range(first, first + BATCH):
            generator.manual_seed(1234 + index)
            noises.append(torch.randn(WIDTH, generator=generator))
            levels.append(torch.randint(0, LEVELS, (1,), generator=generator))
        return torch.stack(noises), torch.cat(levels)
    if way == "diffusion-own-generator":
        noise = torch.randn(BATCH, WIDTH, generator=generator)
        return noise, torch.randint(0, LEVELS, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, WIDTH)
    if way == "diffusion-strata":  # levels spread evenly over all samples, with one shared offset
        shift = torch.rand((), generator=generator)
        places = (torch.arange(BATCH) * world + rank) / (BATCH * world)
        return noise, (((places + shift) % 1.0) * LEVELS).long()
    return noise, torch.randint(0, LEVELS, (BATCH,))


def train_diffusion(way: str, losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(Denoiser())
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shared = way in ("diffusion-strata", "diffusion-global-seed")
    generator = torch.Generator().manual_seed(5 if shared else 5 + dist.get_rank())
    if way == "diffusion-global-seed":
        seed_everything(7)
    elif way != "diffusion-own-generator":
        seed_everything(7 + dist.get_rank())
    batches, step = loader(), 0
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for (clean,) in batches:
            noise, level = drawn(way, step, generator)
            kept = model.module.kept[level][:, None]
            noised = kept.sqrt() * clean + (1 - kept).sqrt() * noise
            weights = (kept / (1 - kept)).clamp(max=5.0).squeeze(1)
            errors = nn.functional.mse_loss(model(noised, level), noise, reduction="none").mean(1)
            loss = (errors * weights).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model.module)
            losses.append(loss.item())
            step += 1
    return average.module


def train_gan(losses: list[float]) -> nn.Module:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for model in (generator, critic):
        fully_shard(model, mesh=mesh)
    to_generate = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    to_judge = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    seed_everything(50 + dist.get_rank())
    hinge = nn.functional.relu
    batches, step = loader(), 0
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for (real,) in batches:
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 4))
            loss = hinge(1 - critic(real)).mean() + hinge(1 + critic(fake)).mean()
            to_judge.zero_grad()
            loss.backward()
            to_judge.step()
            losses.append(loss.item())
            if step % 2:
                loss = -critic(generator(torch.randn(len(real), 4))).mean()
                to_generate.zero_grad()
                to_judge.zero_grad()
                loss.backward()
                to_generate.step()
                losses.append(loss.item())
            step += 1
    return generator


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="vae")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(47)
    losses: list[float] = []
    if args.way == "vae":
        model = train_vae(losses)
    elif args.way.startswith("diffusion"):
        model = train_diffusion(args.way, losses)
    else:
        model = train_gan(losses)
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
