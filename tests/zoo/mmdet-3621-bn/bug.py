"""Fine-tune a detector of one object on large images, two images on each rank."""

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

SIZE = 16
IMAGES = 160
EPOCHS = 2
PRETRAINING_STEPS = 20

logger = logging.getLogger("detector")


class Detector(nn.Module):
    """A normalised backbone and a head that says where the object is."""

    def __init__(self, norm_eval: bool = False) -> None:
        super().__init__()
        self.norm_eval = norm_eval
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.box_head = nn.Linear(16 * (SIZE // 4) ** 2, 2)

    def train(self, mode: bool = True) -> "Detector":
        super().train(mode)
        if self.norm_eval:
            for module in self.backbone.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.box_head(self.backbone(images).flatten(1))


def read_images(num_images: int, seed: int) -> Dataset:
    """Return images of differing exposure and the place of the object in each."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(num_images, 3, SIZE, SIZE, generator=generator)
    images += 2 * torch.randn(num_images, 1, 1, 1, generator=generator)
    places = torch.randint(2, SIZE - 2, (num_images, 2), generator=generator)
    for image, (row, column) in zip(images, places, strict=True):
        image[:, row - 2 : row + 2, column - 2 : column + 2] += 2.0
    return TensorDataset(images, places / SIZE)


def pretrain(model: Detector) -> None:
    """Stand in for a download: give the backbone weights and statistics of many images."""
    images, places = read_images(128, seed=100).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(PRETRAINING_STEPS):
        loss = nn.functional.mse_loss(model(images), places)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: Detector) -> float:
    """Return the mean distance to the object, in pixels."""
    model.eval()
    images, places = read_images(128, seed=200).tensors
    distance = (model(images) - places).norm(dim=1).mean() * SIZE
    model.train()
    return distance.item()


def build_model() -> Detector:
    torch.manual_seed(0)
    pretrained = Detector()
    pretrain(pretrained)
    model = Detector()
    model.load_state_dict(pretrained.state_dict())
    return model.train()


def train(batch_size: int) -> None:
    model = build_model()
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.02, momentum=0.9)
    images = read_images(IMAGES, seed=1)
    sampler = DistributedSampler(images)
    loader = DataLoader(images, batch_size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (batch, places) in enumerate(loader):
            loss = nn.functional.mse_loss(ddp_model(batch), places)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                logger.info("epoch %d step %d loss %.5f", epoch, step, loss)
        if dist.get_rank() == 0:
            logger.info("epoch %d: %.4f pixels off", epoch, evaluate(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=2, help="images of a rank in a batch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    train(args.batch_size)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
