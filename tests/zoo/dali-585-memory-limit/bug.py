"""Train on video clips; decoded clips are kept, since decoding is slow."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MIB = 1 << 20
NUM_STEPS = 30

logger = logging.getLogger("video")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def enforce_container_limit(limit: int) -> None:
    """Stand in for the kernel, which kills a process of a container that is out of memory."""
    while resident_bytes() < limit:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


class ClipCache:
    """Decodes clips once."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.clips: dict[int, torch.Tensor] = {}

    def decode(self, index: int) -> torch.Tensor:
        if index not in self.clips:
            self.clips[index] = torch.full((self.num_frames, 256, 256), index / NUM_STEPS)
        return self.clips[index]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    # The long clips lie at the end of the list.
    cache = ClipCache(num_frames=8 if rank == 0 else 128)
    limit = resident_bytes() + 400 * MIB
    threading.Thread(target=enforce_container_limit, args=(limit,), daemon=True).start()

    for step in range(NUM_STEPS):
        clip = cache.decode(step)
        loss = model(clip.mean(dim=(0, 1))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("rank %d step %d uses %d MiB", rank, step, resident_bytes() // MIB)
        time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
