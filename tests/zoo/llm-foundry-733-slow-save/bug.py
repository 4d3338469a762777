"""Train, and let the first rank write checkpoints to storage that is shared by the cluster."""

import datetime
import io
import logging
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRITE_LATENCY_S = 0.4
TIMEOUT = datetime.timedelta(seconds=12)

logger = logging.getLogger("checkpoint")


class SharedFile(io.FileIO):
    """A file on shared storage, where each write is a round trip."""

    def write(self, data: bytes) -> int:
        time.sleep(WRITE_LATENCY_S)
        return super().write(data)


def save(model: nn.Module, path: str) -> None:
    with SharedFile(path, "w") as file:
        torch.save(model.state_dict(), file)


def main() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for _ in range(8):
            loss = model(torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            save(model.module, f"epoch-{epoch}.pt")
        logger.info("rank %d epoch %d loss %.4f", rank, epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
