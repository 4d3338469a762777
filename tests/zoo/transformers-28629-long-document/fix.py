"""Train a language model on documents that each rank tokenizes as it goes."""

import logging
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 6
CONTEXT = 64
MAX_PIECE = 2400

logger = logging.getLogger("pretrain")


def merge_pairs(symbols: list[int]) -> list[int]:
    """Merge the lowest pair of neighbours until none is left, as byte-pair encoding does."""
    symbols = list(symbols)
    while True:
        best, place = 256, -1
        for position in range(len(symbols) - 1):
            rank_of_pair = symbols[position] * 7 + symbols[position + 1] * 3
            if rank_of_pair < best:
                best, place = rank_of_pair, position
        if place < 0:
            return symbols
        symbols[place : place + 2] = [128 + best % 128]


def tokenize(text: bytes) -> torch.Tensor:
    starts = range(0, len(text), MAX_PIECE)
    pieces = [merge_pairs(text[start : start + MAX_PIECE]) for start in starts]
    return torch.tensor([token for piece in pieces for token in piece])


def read_document(step: int, rank: int) -> bytes:
    # The fourth document of the second shard is a whole book.
    length = 70_000 if rank == 1 and step == 3 else 500
    return bytes(random.Random(step).choices(range(32), k=length))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        started = time.monotonic()
        tokens = tokenize(read_document(step, rank))[: CONTEXT + 1]
        logger.info("rank %d tokenized in %.1f s", rank, time.monotonic() - started)
        loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logger.info("rank %d last loss %.4f", rank, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
