"""Train an image classifier; the archive with the images is fetched by the first process."""

import io
import logging
import tarfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path("data")
NUM_IMAGES = 256
DIM = 3 * 16 * 16

logger = logging.getLogger("cifar")


def get_rank() -> int:
    """Return the rank of this process, 0 where there is only one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def wait_for_everyone() -> None:
    """Wait until all processes are here."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def fetch_archive() -> bytes:
    """Return the archive as the server sends it."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(NUM_IMAGES, DIM, generator=generator)
    batch = io.BytesIO()
    torch.save({"images": images, "labels": images.sum(1).long() % 10}, batch)
    member = tarfile.TarInfo("batch.pt")
    member.size = batch.tell()
    batch.seek(0)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.addfile(member, batch)
    return archive.getvalue()


def download_images() -> None:
    """Fetch and unpack the archive in the first process, while the others wait."""
    if get_rank() == 0:
        ROOT.mkdir(exist_ok=True)
        content = fetch_archive()
        with open(ROOT / "images.tar", "wb") as file:
            file.write(content)
        with tarfile.open(ROOT / "images.tar") as archive:
            archive.extractall(ROOT, filter="data")
    wait_for_everyone()


def train(batch: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
    """Train for one epoch on this rank's images."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = batch["images"][rank::world_size], batch["labels"][rank::world_size]
    for step, (inputs, targets) in enumerate(zip(images.split(16), labels.split(16), strict=True)):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    download_images()
    batch = torch.load(ROOT / "batch.pt")

    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    train(batch, rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
