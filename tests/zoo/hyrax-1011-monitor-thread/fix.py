"""Train a small network while a thread watches the memory of the process."""

import logging
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("monitored")


class MemoryMonitor(threading.Thread):
    """Samples the resident memory until it is stopped."""

    def __init__(self, interval_s: float) -> None:
        super().__init__(name="memory-monitor", daemon=True)
        self.interval_s = interval_s
        self.peak_pages = 0
        self.is_stopped = False

    def run(self) -> None:
        while not self.is_stopped:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.peak_pages = max(self.peak_pages, pages)
            time.sleep(self.interval_s)

    def stop(self) -> int:
        self.is_stopped = True
        self.join()
        return self.peak_pages * os.sysconf("SC_PAGE_SIZE")


def train(rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logger.info("rank %d last loss %.4f", rank, loss.item())
    return model.module


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    monitor = MemoryMonitor(interval_s=0.1)
    monitor.start()
    model = train(rank)
    dist.destroy_process_group()
    if rank != 0:
        return
    torch.save(model.state_dict(), "model.pt")
    logger.info("peak memory %d MiB", monitor.stop() >> 20)


if __name__ == "__main__":
    main()
