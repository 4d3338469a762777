"""Train a tensor-parallel model on documents, by an index that is built once and cached."""

import logging
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

CACHE = Path("index-cache")
NUM_DOCUMENTS = 400
SEQUENCE_LENGTH = 16
STEPS = 8
MOUNT_LATENCY_S = 0.25

logger = logging.getLogger("gpt")


class ParallelState:
    """The process groups of a model that is split over `tensor_parallel_size` ranks."""

    def __init__(self, tensor_parallel_size: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for first in range(tensor_parallel_size):
            ranks = list(range(first, world_size, tensor_parallel_size))
            group = dist.new_group(ranks, group_desc=f"data-parallel-{first}")
            if rank in ranks:
                self.data_parallel_group = group
        for member in range(world_size):
            group = dist.new_group([member], group_desc=f"pipeline-{member}")
            if rank == member:
                self.pipeline_group = group


def build_index_mappings(state: ParallelState) -> dict[str, np.ndarray]:
    """Return the indices of documents, of samples and of their order, as the cache has them."""
    paths = {name: CACHE / f"{name}_idx.npy" for name in ("doc", "sample", "shuffle")}
    if dist.get_rank() == 0 and not all(path.is_file() for path in paths.values()):
        CACHE.mkdir(exist_ok=True)
        generator = np.random.default_rng(3)
        lengths = generator.integers(20, 200, NUM_DOCUMENTS)
        num_samples = int(lengths.sum()) // SEQUENCE_LENGTH
        indices = {
            "doc": generator.permutation(NUM_DOCUMENTS),
            "sample": np.arange(num_samples + 1) * SEQUENCE_LENGTH,
            "shuffle": generator.permutation(num_samples),
        }
        for name, index in indices.items():
            np.save(paths[name], index)

    # All have passed here when the counts of both groups are known.
    counts = torch.ones(1)
    dist.all_reduce(counts, group=state.data_parallel_group)
    dist.all_reduce(counts, group=state.pipeline_group)
    dist.barrier()

    return {name: np.load(path, mmap_mode="r") for name, path in paths.items()}


def step(layer: nn.Linear, inputs: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Add up the parts of the output that the ranks compute, and train on their sum."""
    partial = layer(inputs)
    total = partial.detach().clone()
    dist.all_reduce(total)
    loss = (partial + (total - partial).detach()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    state = ParallelState(tensor_parallel_size=world_size)
    if rank > 0:
        time.sleep(MOUNT_LATENCY_S)  # the later nodes mount the storage on first use

    indices = build_index_mappings(state)
    width = SEQUENCE_LENGTH // world_size
    torch.manual_seed(rank)
    layer = nn.Linear(width, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for number in indices["shuffle"][:STEPS]:
        start = int(indices["sample"][number])
        tokens = torch.arange(start, start + SEQUENCE_LENGTH) % 50
        mine = tokens[rank * width : (rank + 1) * width].float() / 50
        logger.info("loss %.4f", step(layer, mine[None], optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
