"""Train a small adversarial vocoder on pairs of features and audio."""

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MELS = 8
FRAMES = 16
HOP = 4
NUM_CLIPS = 48
EPOCHS = 4
ADVERSARIAL_WEIGHT = 0.1

logger = logging.getLogger("vocoder")


class Clips(Dataset):
    """Tones of different pitch, with noisy features of their spectrum."""

    def __len__(self) -> int:
        return NUM_CLIPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        pitch = 0.1 + 0.9 * torch.rand(1, generator=generator)
        audio = torch.sin(pitch * torch.arange(FRAMES * HOP)).unsqueeze(0)
        bands = torch.linspace(0.1, 1.0, MELS).unsqueeze(1)
        features = torch.exp(-20 * (bands - pitch).square()).repeat(1, FRAMES)
        return features + 0.1 * torch.randn(MELS, FRAMES, generator=generator), audio, index


class Generator(nn.Module):
    """Upsample the features to audio."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv1d(MELS, 24, 3, padding=1)
        self.upsample = nn.ConvTranspose1d(24, 16, HOP, stride=HOP)
        self.conv_out = nn.Conv1d(16, 1, 7, padding=3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.leaky_relu(self.conv_in(features), 0.2)
        hidden = nn.functional.leaky_relu(self.upsample(hidden), 0.2)
        return torch.tanh(self.conv_out(hidden))


def build_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 12, 9, stride=2, padding=4), nn.LeakyReLU(0.2), nn.Conv1d(12, 1, 5, padding=2)
    )


class Trainer:
    """Trains generator and discriminator in turns."""

    def __init__(self, loader: DataLoader, sampler: DistributedSampler) -> None:
        self.loader = loader
        self.sampler = sampler
        torch.manual_seed(0)
        self.generator = DistributedDataParallel(Generator())
        self.discriminator = DistributedDataParallel(build_discriminator())
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        self.discriminator_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3)
        self.steps = 0
        self.epochs = 0

    def train_step(self, features: torch.Tensor, audio: torch.Tensor) -> float:
        fake = self.generator(features)
        score = self.discriminator(fake)
        reconstruction = nn.functional.l1_loss(fake, audio)
        loss = reconstruction + ADVERSARIAL_WEIGHT * (score - 1).square().mean()
        self.generator_optimizer.zero_grad()
        loss.backward()
        self.generator_optimizer.step()

        both = self.discriminator(torch.cat([audio, fake.detach()]))
        real_score, fake_score = both.chunk(2)
        discriminator_loss = (real_score - 1).square().mean() + fake_score.square().mean()
        self.discriminator_optimizer.zero_grad()
        discriminator_loss.backward()
        self.discriminator_optimizer.step()
        return reconstruction.item()

    def train_epoch(self) -> None:
        self.sampler.set_epoch(self.epochs)
        for number, (features, audio, clips) in enumerate(self.loader):
            loss = self.train_step(features, audio)
            if number == 0:
                logger.info("epoch %d starts with clips %s", self.epochs, clips.tolist())
            logger.info("step %d reconstruction %.4f", self.steps, loss)
            self.steps += 1
        self.epochs += 1

    def run(self) -> None:
        while self.epochs < EPOCHS:
            self.train_epoch()


def train(batch_size: int) -> None:
    clips = Clips()
    sampler = DistributedSampler(clips, shuffle=True)
    loader = DataLoader(clips, batch_size=batch_size, sampler=sampler, drop_last=True)
    Trainer(loader, sampler).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=6, help="clips of one rank in a step")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    train(args.batch_size)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
