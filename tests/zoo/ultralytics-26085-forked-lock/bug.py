"""Train a classifier on images that a background thread fetches into a shared cache."""

import logging
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FETCH_S = 0.25

logger = logging.getLogger("images")


def fetch(index: int) -> torch.Tensor:
    """Fetch an image from the object store."""
    time.sleep(FETCH_S)
    return torch.full((48,), index / 16)


class ImageCache:
    """Images in memory; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._images = {index: torch.full((48,), index / 16) for index in range(12)}

    def warm_up(self, indices: range) -> None:
        with self._lock:
            for index in indices:
                self._images[index] = fetch(index)

    def get(self, index: int) -> torch.Tensor:
        with self._lock:
            if index not in self._images:
                self._images[index] = fetch(index)
            return self._images[index]


class Images(Dataset):
    """A shard of the images with their labels."""

    def __init__(self, cache: ImageCache, num_images: int) -> None:
        self.cache = cache
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.cache.get(index), index % 2


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    cache = ImageCache()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The disk of the first machine holds all of its images already.
    to_fetch = range(12, 12 if rank == 0 else 22)
    warm_up = threading.Thread(target=cache.warm_up, args=(to_fetch,), daemon=True)
    warm_up.start()
    time.sleep(0.2)  # the learning-rate finder

    loader = DataLoader(Images(cache, num_images=12), batch_size=4, num_workers=1)
    for epoch in range(2):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logger.info("rank %d epoch %d loss %.4f", rank, epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
