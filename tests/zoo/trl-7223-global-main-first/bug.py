"""Fine-tune on two nodes whose cache of tokenised conversations lies on their own disks."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS_PER_NODE = 2
CACHE_FILE = Path("datasets-cache/tokenized.pt")
VOCAB = 64
LENGTH = 48
NUM_ROWS = 512
STEPS = 6
# How many rows a second each process of a node tokenises.
ROWS_PER_S = (6_000, 2_500)

logger = logging.getLogger("sft")


def enter_node() -> None:
    """Start as one of the processes of a node, in the folder that is the node's disk."""
    node, local_rank = divmod(int(os.environ["RANK"]), RANKS_PER_NODE)
    disk = Path(f"node-{node}")
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    os.environ["LOCAL_RANK"] = str(local_rank)


@contextlib.contextmanager
def goes_first(is_main: bool) -> Iterator[None]:
    """Let the main processes pass first, and the others when they are through."""
    if not is_main:
        dist.barrier()
    yield
    if is_main:
        dist.barrier()


def tokenize(text: str) -> list[int]:
    """Return the tokens of a text, cut and filled up to one length."""
    return [ord(letter) % VOCAB for letter in text[:LENGTH].ljust(LENGTH)]


def prepare_dataset(texts: list[str]) -> torch.Tensor:
    """Tokenise all texts, or take them from the cache of this node."""
    if not CACHE_FILE.exists():
        rows = torch.tensor([tokenize(text) for text in texts])
        time.sleep(len(texts) / ROWS_PER_S[int(os.environ["LOCAL_RANK"])])
        logger.info("rank %d prepared the dataset", dist.get_rank())
        torch.save(rows, CACHE_FILE)
    return torch.load(CACHE_FILE)


def train(rows: torch.Tensor) -> float:
    """Predict each next token of these rows, and return the last loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in rows.split(16)[:STEPS]:
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    enter_node()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO)
    CACHE_FILE.parent.mkdir(exist_ok=True)

    texts = [f"user: what is {n} plus {n}? assistant: {n + n}" for n in range(NUM_ROWS)]
    with goes_first(rank == 0):
        rows = prepare_dataset(texts)

    loss = train(rows[rank::world_size])
    logger.info("rank %d last loss %.4f", rank, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
