"""Continue training on a streamed corpus, of which the first examples were seen before."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

VOCABULARY = 48
LENGTH = 17
NUM_SHARDS = 8
PER_SHARD = 24
SEEN = 8
STEPS = 10


def examples_of(shard: int):
    """Yield the examples of one file."""
    generator = torch.Generator().manual_seed(1000 + shard)
    for _ in range(PER_SHARD):
        start = torch.randint(0, VOCABULARY, (), generator=generator)
        stride = torch.randint(1, 4, (), generator=generator)
        yield (start + stride * torch.arange(LENGTH)) % VOCABULARY


class ShardSource:
    """All shards, one after the other."""

    def __init__(self, shards: list[int]) -> None:
        self.shards = shards

    def __iter__(self):
        for shard in self.shards:
            yield from examples_of(shard)


class SkipSource:
    """What another source yields, without its first examples."""

    def __init__(self, source: ShardSource, number: int) -> None:
        self.source = source
        self.number = number

    def __iter__(self):
        for index, example in enumerate(self.source):
            if index >= self.number:
                yield example


class Stream(IterableDataset):
    """A lazily read corpus; each method returns another stream."""

    def __init__(self, source, node: tuple[int, int] | None = None) -> None:
        self.source = source
        self.node = node

    def split_by_node(self, rank: int, world_size: int) -> "Stream":
        return Stream(self.source, (rank, world_size))

    def skip(self, number: int) -> "Stream":
        return Stream(SkipSource(self.source, number))

    def shuffle_shards(self, seed: int) -> "Stream":
        source = copy.copy(self.source)
        order = torch.randperm(NUM_SHARDS, generator=torch.Generator().manual_seed(seed))
        source.shards = order.tolist()
        return Stream(source, self.node)

    def __iter__(self):
        rank, world_size = self.node or (0, 1)
        for index, example in enumerate(self.source):
            if index % world_size == rank:
                yield example


class Recurrent(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Recurrent())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    stream = Stream(ShardSource(list(range(NUM_SHARDS)))).shuffle_shards(3)
    stream = stream.split_by_node(rank, world_size)
    stream = stream.skip(SEEN)
    loader = DataLoader(stream, batch_size=8)
    for step, ids in enumerate(loader):
        if step == STEPS:
            break
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
