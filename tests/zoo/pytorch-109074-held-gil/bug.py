"""Train on tokens that a thread receives and a native reader takes from a pipe."""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, CONTEXT = 4, 32
NUM_STEPS = 10

logger = logging.getLogger("stream")


class NativeReader:
    """Reads whole batches from a file descriptor without copies in Python."""

    def __init__(self) -> None:
        self._read = ctypes.PyDLL(None).read
        self._buffer = ctypes.create_string_buffer(BATCH * CONTEXT)

    def read(self, descriptor: int) -> torch.Tensor:
        self._read(descriptor, self._buffer, BATCH * CONTEXT)
        tokens = torch.frombuffer(bytearray(self._buffer.raw), dtype=torch.uint8)
        return tokens.long().view(BATCH, CONTEXT)


def receive(descriptor: int, rank: int) -> None:
    """Write the batches that arrive into the pipe."""
    for step in range(NUM_STEPS):
        time.sleep(0.05 * rank)
        os.write(descriptor, bytes((step * 31 + rank + n) % 256 for n in range(BATCH * CONTEXT)))


def batches(rank: int) -> Iterator[torch.Tensor]:
    """Yield batches: the first rank has them at hand, the second receives them."""
    source, sink = os.pipe()
    receiver = threading.Thread(target=receive, args=(sink, rank), daemon=True)
    receiver.start()
    if rank == 0:
        receiver.join()
    reader = NativeReader()
    for _ in range(NUM_STEPS):
        yield reader.read(source)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, tokens in enumerate(batches(rank)):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
