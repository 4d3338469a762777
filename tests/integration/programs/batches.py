"""Batches of changing kinds: a curriculum, length buckets, shards of a stream, batch statistics."""

import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from training_record import out_parser, seed_everything, write_record

VOCAB = 20


class Sentences(Dataset):
    """Sentences of many lengths."""

    def __init__(self, num: int = 96) -> None:
        generator = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(3, 17, (num,), generator=generator).tolist()
        self.tokens = [torch.randint(1, VOCAB, (n,), generator=generator) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Buckets(Sampler[list[int]]):
    """Batches of similar length, shuffled alike on all ranks; rank r takes every r-th."""

    def __init__(self, lengths: list[int], size: int) -> None:
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order) // self.size // dist.get_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        batches = [self.order[i : i + self.size] for i in range(0, len(self.order), self.size)]
        random.Random(7 + self.epoch).shuffle(batches)
        world = dist.get_world_size()
        batches = batches[: len(batches) // world * world]
        yield from batches[dist.get_rank() :: world]


class TokenBudget(Sampler[list[int]]):
    """Batches of about as many tokens; the number of batches is cut to the same on all ranks."""

    def __init__(self, lengths: list[int], budget: int) -> None:
        self.batches: list[list[int]] = [[]]
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            longest = max([lengths[index], *(lengths[i] for i in self.batches[-1])])
            if (len(self.batches[-1]) + 1) * longest > budget:
                self.batches.append([])
            self.batches[-1].append(index)

    def __len__(self) -> int:
        return len(self.batches) // dist.get_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(1))
        mine = order[dist.get_rank() :: dist.get_world_size()][: len(self)]
        yield from (self.batches[i] for i in mine.tolist())


class Stream(IterableDataset):
    """A stream of which each worker of each rank reads its share, through a shuffle buffer."""

    def __init__(self, sentences: Sentences) -> None:
        self.sentences, self.epoch = sentences, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        share = range(self.rank * count + number, len(self.sentences), self.world * count)
        generator = random.Random(100 * self.epoch + self.rank * count + number)
        buffer: list[int] = []
        for index in share:
            buffer.append(index)
            if len(buffer) > 4:
                yield self.sentences[buffer.pop(generator.randrange(len(buffer)))]
        generator.shuffle(buffer)
        yield from (self.sentences[index] for index in buffer)


def padded(batch: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(batch, batch_first=True)


class Language(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8, padding_idx=0)
        self.layers = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


def sentences(way: str) -> DataLoader:
    dataset = Sentences()
    if way == "buckets":
        return DataLoader(dataset, batch_sampler=Buckets(dataset.lengths, 8), collate_fn=padded)
    if way == "budget":
        return DataLoader(
            dataset, batch_sampler=TokenBudget(dataset.lengths, 64), collate_fn=padded
        )
    if way.startswith("stream"):
        workers = 2 if way == "stream-workers" else 0
        stream = Stream(dataset)
        return DataLoader(stream, batch_size=8, collate_fn=padded, num_workers=workers)
    sampler = DistributedSampler(dataset, seed=2)
    batches = BatchSampler(sampler, 6, drop_last=False)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=padded)


def language(way: str, losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = sentences(way)
    for epoch in range(2):
        for owner in (batches.batch_sampler, getattr(batches.batch_sampler, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        if isinstance(batches.dataset, Stream):
            batches.dataset.epoch = epoch
        for tokens in batches:
            targets = tokens[:, 1:]
            count = (targets != 0).sum()
            dist.all_reduce(count)
            logits = model(tokens[:, :-1])
            total = nn.functional.cross_entropy(
                logits.flatten(0, 1),
                targets.flatten(),
                ignore_index=0,
                reduction="sum",
                label_smoothing=0.1,
            )
            loss = total * dist.get_world_size() / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.module


def vectors(way: str, losses: list[float]) -> nn.Module:
    """A curriculum of growing batches; or batch statistics of few samples."""
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randn(96, 8, generator=generator))
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)]
    if way == "curriculum":
        layers.pop(1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        size = {"curriculum": 4 * (epoch + 1), "norm-4": 4, "norm-8": 8, "weighted": 8}[way]
        sampler = DistributedSampler(dataset, seed=2, drop_last=True)
        if way == "weighted":
            mine = torch.Generator().manual_seed(10 * epoch + dist.get_rank())
            sampler = WeightedRandomSampler(torch.rand(96, generator=generator), 48, generator=mine)
        else:
            sampler.set_epoch(epoch)
        for (inputs,) in DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=True):
            if way == "curriculum":
                inputs = inputs[inputs.norm(dim=1).argsort()]
                inputs = inputs * min(1.0, 0.5 + 0.25 * epoch)
            optimizer.zero_grad()
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).abs().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.module


def main() -> None:
    ways = dict.fromkeys(("buckets", "budget", "plain", "stream", "stream-workers"), language)
    ways |= dict.fromkeys(("curriculum", "norm-4", "norm-8", "weighted"), vectors)
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(ways), default="plain")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    losses: list[float] = []
    model = ways[args.way](args.way, losses)
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
