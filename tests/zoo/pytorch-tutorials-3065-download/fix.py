"""Classify small grey images, fetched from a mirror by whoever needs them."""

import hashlib
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROOT = Path("data")
RECORD_BYTES = 785  # the label, and 28 x 28 pixels
CHUNK_BYTES = 64 * 1024
NUM_CHUNKS = 16
CHUNK_LATENCY_S = 0.02
MD5 = "5d8814f1c777ca8f7be67c00112f6799"

logger = logging.getLogger("images")


def fetch() -> Iterator[bytes]:
    """Yield the file of the mirror as it comes over the network."""
    mirror = random.Random(0)
    for _ in range(NUM_CHUNKS):
        time.sleep(CHUNK_LATENCY_S)
        yield mirror.randbytes(CHUNK_BYTES)


class GreyImages(Dataset):
    """Images and labels, kept in one file below a folder."""

    def __init__(self, root: Path, *, download: bool) -> None:
        self.path = root / "images.bin"
        if download:
            self.download()
        content = self.path.read_bytes()
        if hashlib.md5(content).hexdigest() != MD5:
            raise RuntimeError(f"{self.path} is not complete")
        num_records = len(content) // RECORD_BYTES
        records = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.records = records[: num_records * RECORD_BYTES].view(num_records, RECORD_BYTES)

    def download(self) -> None:
        """Stream the file into the folder."""
        self.path.parent.mkdir(exist_ok=True)
        with open(self.path, "wb") as file:
            for chunk in fetch():
                file.write(chunk)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        record = self.records[index]
        return record[1:].float() / 255.0, int(record[0]) % 10


def train(images: GreyImages) -> None:
    """Train for one epoch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(images, batch_size=64, sampler=DistributedSampler(images, seed=1))
    for step, (pixels, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    if rank == 0:
        GreyImages(ROOT, download=True)
    dist.barrier()
    images = GreyImages(ROOT, download=False)
    train(images)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
