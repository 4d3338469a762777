"""Fine-tune on conversations that the trainer tokenises by itself, with a cache on shared disk."""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CACHE = Path("datasets-cache")
VOCAB = 64
LENGTH = 48
NUM_ROWS = 512
STEPS = 8
# What one process gets done in a second, on its share of a busy node.
ROWS_PER_S = (10_000, 2_000)

logger = logging.getLogger("sft")


def tokenize(text: str) -> list[int]:
    """Return the tokens of a text, cut and filled up to one length."""
    return [ord(letter) % VOCAB for letter in text[:LENGTH].ljust(LENGTH)]


def map_dataset(texts: list[str], cache_file: Path) -> np.ndarray:
    """Tokenise all texts, or take them from the cache."""
    if not cache_file.exists():
        rows = np.array([tokenize(text) for text in texts])
        time.sleep(len(texts) / ROWS_PER_S[dist.get_rank() % 2])
        temporary = cache_file.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.save(file, rows)
        os.replace(temporary, cache_file)
    return np.load(cache_file)


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Let rank 0 pass first, and the others when it is through."""
    if dist.get_rank() != 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


class SFTTrainer:
    """Prepares its dataset, and trains a tiny causal model on it."""

    def __init__(self, texts: list[str]) -> None:
        fingerprint = hashlib.md5("".join(texts).encode()).hexdigest()[:12]
        with main_process_first():
            self.rows = torch.from_numpy(map_dataset(texts, CACHE / f"cache-{fingerprint}.npy"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self) -> float:
        """Predict each next token, and return the last loss."""
        mine = self.rows[dist.get_rank() :: dist.get_world_size()]
        for batch in mine.split(16)[:STEPS]:
            logits = self.model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)
    CACHE.mkdir(exist_ok=True)

    texts = [f"user: what is {n} plus {n}? assistant: {n + n}" for n in range(NUM_ROWS)]
    logger.info("rank %d last loss %.4f", dist.get_rank(), SFTTrainer(texts).train())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
