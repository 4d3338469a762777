"""Fit a bag-of-words classifier; the vocabulary is built once and kept in a cache folder."""

import collections
import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CACHE = Path("cache")
CORPUS = ["the cat sat on the mat", "a dog ran to the cat", "the mat was red", "a red dog sat"] * 8

logger = logging.getLogger("vocabulary")


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Let one process of this machine at a time touch a part of the cache."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load_vocabulary(size: int) -> dict[str, int]:
    """Build the vocabulary if the cache has none, and read it from there."""
    path = CACHE / "vocabulary.pt"
    with cache_lock("vocabulary"):
        if not path.exists():
            counts = collections.Counter(word for line in CORPUS for word in line.split())
            torch.save([word for word, _ in counts.most_common(size)], path)
    dist.barrier()  # nobody reads a file that is not complete
    words = torch.load(path)
    return {word: number for number, word in enumerate(words)}


def encode(line: str, vocabulary: dict[str, int]) -> torch.Tensor:
    ids = [vocabulary[word] for word in line.split() if word in vocabulary]
    return torch.bincount(torch.tensor(ids), minlength=len(vocabulary)).float()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO)

    vocabulary = load_vocabulary(size=8)
    logger.info("rank %d has %d words", rank, len(vocabulary))

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(len(vocabulary), 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, line in enumerate(CORPUS[rank::world_size]):
        logits = model(encode(line, vocabulary)[None])
        loss = nn.functional.cross_entropy(logits, torch.tensor([number % 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logger.info("rank %d last loss %.4f", rank, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
