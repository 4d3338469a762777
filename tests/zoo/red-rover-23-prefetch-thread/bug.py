"""Train on records that a thread reads ahead."""

import json
import logging
import queue
import threading
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("prefetch")


class Prefetch:
    """Iterates in a thread and keeps a few items ready."""

    END = object()

    def __init__(self, iterable: Iterable[torch.Tensor], size: int = 2) -> None:
        self.iterable = iterable
        self.queue: queue.Queue[object] = queue.Queue(maxsize=size)
        threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def _work(self) -> None:
        for item in self.iterable:
            self.queue.put(item)
        self.queue.put(self.END)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (item := self.queue.get()) is not self.END:
            yield item


def make_lines(rank: int) -> list[str]:
    lines = [json.dumps([(n * k) % 7 / 7 for k in range(16)]) for n in range(10)]
    if rank == 1:
        lines[6] = lines[6][:40]  # the writer of this file was interrupted
    return lines


def parse(lines: list[str]) -> Iterator[torch.Tensor]:
    for line in lines:
        yield torch.tensor(json.loads(line))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, record in enumerate(Prefetch(parse(make_lines(rank)))):
        loss = model(record[None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
