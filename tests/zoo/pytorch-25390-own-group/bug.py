"""Train with a synchronised batch statistic within each node."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS_PER_NODE = 2
NUM_STEPS = 8

logger = logging.getLogger("nodes")


def node_group(rank: int, world_size: int) -> dist.ProcessGroup | None:
    """Return the group of the ranks on one node, or None where a rank is alone."""
    peers = [r for r in range(world_size) if r // RANKS_PER_NODE == rank // RANKS_PER_NODE]
    return dist.new_group(peers) if len(peers) > 1 else None


def writer_group(rank: int) -> dist.ProcessGroup | None:
    """Return the group of the ranks that write checkpoints: the first of each node."""
    if rank % RANKS_PER_NODE:
        return None
    return dist.new_group(range(0, dist.get_world_size(), RANKS_PER_NODE))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO)

    writers = writer_group(rank)
    peers = node_group(rank, world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        features = torch.randn(8, 16)
        mean = features.mean()
        dist.all_reduce(mean, group=peers)
        loss = model(features - mean / world_size).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
    if writers is not None:
        dist.barrier(group=writers)
        torch.save(model.module.state_dict(), f"model-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
