"""Train, and sample with an inference server whose address the first rank publishes."""

import logging
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("sampling")


class Sampler:
    """Asks a server for samples; all ranks share the one that the first rank starts."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank = store, rank
        self.server: socket.socket | None = None

    def start_server(self, step: int) -> None:
        """Start a server for the new weights, unless the last one still has them."""
        if self.server is not None and step % 4:
            return
        if self.server is not None:
            self.server.close()
        self.server = socket.create_server(("127.0.0.1", 0))
        port = self.server.getsockname()[1]
        self.store.set(f"server/{step}", str(port))

    def address(self, step: int) -> int:
        return int(self.store.get(f"server/{step}"))

    def sample(self, step: int) -> torch.Tensor:
        if self.rank == 0:
            self.start_server(step)
            return torch.randn(8, 16)
        with socket.create_connection(("127.0.0.1", self.address(step))):
            return torch.randn(8, 16)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)
    store = dist.PrefixStore("sampling", dist.distributed_c10d._get_default_store())

    sampler = Sampler(store, rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        loss = model(sampler.sample(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
