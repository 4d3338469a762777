"""Trains rightly in many ways that a comparison with one rank may take for wrong.

``--kind`` names one of `KINDS`: each gives on any number of ranks what it gives on one, but not
with ``--broken``.
"""

import argparse
import dataclasses
import random
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import distdiag.parity

WORDS, IGNORED, CLASSES = 12, -7, 4


def text(number):
    draw = torch.Generator().manual_seed(number)
    length = int(torch.randint(3, 9, (), generator=draw))
    return torch.randint(1, WORDS, (length + 1,), generator=draw)


class Texts(Dataset):
    """Texts of 3 to 8 words, whose labels are the words that come next."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return text(number)


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        return (text(number) for number in range(self.rank, 64, self.world))


class Points(Dataset):
    """Points in a plane of eight dimensions, with a class and a weight."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(8, generator=draw)
        return x, int(x[0] > 0) + 2 * int(x[1] > 0), float(torch.rand((), generator=draw)) + 0.1


class Pair(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    labels: torch.Tensor
    num_words: int = 0


def padded(texts):
    longest = max(map(len, texts)) - 1
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    labels = torch.full((len(texts), longest), IGNORED)
    for row, words in enumerate(texts):
        ids[row, : len(words) - 1], labels[row, : len(words) - 1] = words[:-1], words[1:]
    return ids, labels


def as_dict(texts):
    ids, labels = padded(texts)
    return {"input": {"ids": ids}, "target": labels.masked_fill(labels == IGNORED, -100)}


def as_dataclass(texts):
    ids, labels = padded(texts)
    return Batch(ids, labels, int((labels != IGNORED).sum()))


def counted(texts):
    """Count in the batch, as many data collators do."""
    ids, labels = padded(texts)
    return ids, labels, int((labels != IGNORED).sum()), [len(words) for words in texts]


def packed(texts):
    """Put all texts into one row, with where they end."""
    ids = torch.cat([words[:-1] for words in texts])[None]
    labels = torch.cat([words[1:] for words in texts])[None]
    return ids, labels, torch.tensor([len(words) - 1 for words in texts]).cumsum(0)


def masking(texts):
    """Hide some words at random, as for masked language models."""
    ids, labels = padded(texts)
    hidden = torch.rand(ids.shape) < 0.3
    return ids.masked_fill(hidden, 0), labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(WORDS, 16), nn.Linear(16, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids):
        return self.head(F.gelu(self.up(self.embed(ids))))


class Classifier(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), norm or nn.Identity()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.up(x))))


class GlobalNorm(nn.Module):
    """Batch normalisation with the statistics of all ranks' samples."""

    def forward(self, x):
        sums = torch.stack((x.sum(0), x.square().sum(0)))
        count = torch.tensor(float(len(x)))
        sums = dist_nn.all_reduce(sums)
        dist.all_reduce(count)
        mean, square = sums / count
        return (x - mean) / (square - mean.square() + 1e-5).sqrt()


class Gated(nn.Module):
    """Sends each sample to one expert, and no more than the capacity of the whole batch to any."""

    def __init__(self, is_local):
        super().__init__()
        self.gate, self.is_local = nn.Linear(8, 4), is_local
        self.experts = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(4))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.max(-1)
        sent = F.one_hot(chosen, 4)
        before, count = torch.zeros(4, dtype=torch.long), len(x)
        if not self.is_local:
            counts = [torch.zeros(4, dtype=torch.long) for _ in range(dist.get_world_size())]
            dist.all_gather(counts, sent.sum(0))
            before, count = sum(counts[: dist.get_rank()], before), len(x) * len(counts)
        place = (sent.cumsum(0) + before - 1).gather(1, chosen[:, None])[:, 0]
        is_kept = place < count // 4
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return every[torch.arange(len(x)), chosen] * (best * is_kept)[:, None]


def global_sum(value):
    value = torch.as_tensor(value, dtype=torch.float32)
    dist.all_reduce(value)
    return value


def language_loss(model, ids, labels, *, is_broken, ignored=IGNORED):
    """Divide by the words of all ranks; if broken, by those of this rank."""
    total = F.cross_entropy(
        model(ids).flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="sum"
    )
    count = (labels != ignored).sum()
    if is_broken:
        return total / count
    return total * dist.get_world_size() / global_sum(count)


def of_texts(collate, take=lambda batch: batch[:2], ignored=IGNORED, **loader):
    def losses(model, batch, is_broken):
        return language_loss(model, *take(batch), is_broken=is_broken, ignored=ignored)

    return lambda _: (Net(), Texts(), {"collate_fn": collate, **loader}, losses)


def weighted(is_broken):
    def losses(model, batch, _):
        x, y, weights = batch
        total = (F.cross_entropy(model(x), y, reduction="none") * weights.float()).sum()
        if is_broken:
            return total / weights.sum()
        return total * dist.get_world_size() / global_sum(weights.sum())

    return Classifier(), Points(), {}, losses


def tasks(is_broken):
    """Two losses, each over the samples that it concerns."""

    def losses(model, batch, _):
        x, y, _ = batch
        each, total = F.cross_entropy(model(x), y, reduction="none"), 0
        for mask in (y < 1, y >= 1):
            count = (mask.sum() if is_broken else global_sum(mask.sum())).clamp(min=1)
            total = total + (each * mask).sum() / count
        return total if is_broken else total * dist.get_world_size()

    return Classifier(), Points(), {}, losses


def normed(is_broken):
    def losses(model, batch, _):
        return F.cross_entropy(model(batch[0]), batch[1])

    return Classifier(nn.BatchNorm1d(16) if is_broken else GlobalNorm()), Points(), {}, losses


def normed_here(is_broken):
    """Batch normalisation of this rank's samples; if broken, a weight is left out of reduction."""

    def losses(model, batch, _):
        return F.cross_entropy(model(batch[0]), batch[1])

    net = Classifier(nn.BatchNorm1d(16))
    if is_broken:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["head.weight"])
    return net, Points(), {}, losses


def contrastive(is_broken, *, is_local=False):
    """Each sample against those of all ranks; if broken, gradients stop at what was gathered."""

    def losses(model, batch, _):
        ours = F.normalize(model(batch[0]), dim=-1)
        keys = F.normalize(ours + 0.1 * batch[0][:, :CLASSES], dim=-1)
        if is_local:
            return F.cross_entropy(ours @ keys.T / 0.1, torch.arange(len(ours)))
        if is_broken:
            every = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
            dist.all_gather(every, keys)
            every[dist.get_rank()] = keys
        else:
            every = dist_nn.all_gather(keys)
        labels = torch.arange(len(ours)) + dist.get_rank() * len(ours)
        return F.cross_entropy(ours @ torch.cat(tuple(every)).T / 0.1, labels)

    return Classifier(), Points(), {}, losses


def capacity(is_broken):
    def losses(model, batch, _):
        return F.cross_entropy(model(batch[0]), batch[1])

    return Gated(is_broken), Points(), {}, losses


def balanced(is_broken):
    """The load of all ranks with the mean scores; if broken, the load of each rank."""

    def losses(model, batch, _):
        scores = model(batch[0]).softmax(-1)
        load = F.one_hot(scores.argmax(-1), CLASSES).float().mean(0)
        if not is_broken:
            load = global_sum(load) / dist.get_world_size()
        aux = CLASSES * (load * scores.mean(0)).sum()
        return F.cross_entropy(scores.log(), batch[1]) + 0.5 * aux

    return Classifier(), Points(), {}, losses


KINDS = {
    "tuple": of_texts(padded),
    "dict": of_texts(as_dict, lambda batch: (batch["input"]["ids"], batch["target"]), -100),
    "dataclass": of_texts(as_dataclass, lambda batch: (batch.ids, batch.labels)),
    "named": of_texts(lambda texts: Pair(*padded(texts)), lambda batch: batch),
    "nested": of_texts(lambda texts: [padded(texts)], lambda batch: batch[0]),
    "counted": of_texts(counted),
    "packed": of_texts(packed),
    "masking": of_texts(masking),
    "workers": of_texts(padded, num_workers=1),
    "accumulated": of_texts(padded),
    "stream": of_texts(padded),
    "uneven": of_texts(padded),
    "own": of_texts(padded),
    "hand-made": of_texts(padded),
    "by-hand": of_texts(padded),
    "sharded": of_texts(padded),
    "flat": of_texts(padded),
    "compiled": of_texts(padded),
    "weighted": weighted,
    "tasks": tasks,
    "normed": normed,
    "normed-here": normed_here,
    "contrastive": contrastive,
    "local-pairs": lambda is_broken: contrastive(is_broken, is_local=True),
    "capacity": capacity,
    "balanced": balanced,
}


def hand_made(steps=6, size=8):
    """Yield this rank's rows of batches that are made of one large tensor."""
    texts, labels = padded([text(number) for number in range(steps * size)])
    for step in range(steps):
        rows = torch.arange(step * size, (step + 1) * size)
        mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
        yield texts[mine], labels[mine]


class Budget:
    """Batches of other numbers of samples on each rank."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        numbers = list(range(self.rank, 64, self.world))
        size = 3 + 2 * self.rank
        return (numbers[at : at + size] for at in range(0, len(numbers) - size, size))

    def __len__(self):
        return 6


def loader_of(kind, data, options, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "hand-made":
        return hand_made()
    if kind == "stream":
        return DataLoader(Stream(rank, world), batch_size, **options)
    if kind == "uneven":
        return DataLoader(data, batch_sampler=Budget(rank, world), **options)
    loader = DataLoader(data, batch_size, sampler=DistributedSampler(data), **options)
    return map(distdiag.parity.batch, list(loader)) if kind == "own" else loader


def wrapped(kind, net):
    if kind == "by-hand":
        return net
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(net)
    if kind == "flat":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    model = DistributedDataParallel(net)
    return torch.compile(model, backend="eager") if kind == "compiled" else model


def accumulated(model, optimizer, loader, is_broken, num_passes=2):
    """Divide by the words of all passes and ranks; if broken, by those of each pass."""
    waiting = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) < num_passes:
            continue
        count = global_sum(sum(int((labels != IGNORED).sum()) for _, labels in waiting))
        for ids, labels in waiting:
            total = F.cross_entropy(
                model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            own = (labels != IGNORED).sum() * num_passes
            loss = total / own if is_broken else total * dist.get_world_size() / count
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        waiting = []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--adam", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    net, data, options, losses = KINDS[args.kind](args.broken)
    model = wrapped(args.kind, net)
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    kind = torch.optim.AdamW if args.adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05)
    loader = loader_of(args.kind, data, options, 4)
    if args.kind == "accumulated":
        accumulated(model, optimizer, loader, args.broken)
    else:
        for batch in loader:
            loss = losses(model, batch, args.broken)
            optimizer.zero_grad()
            loss.backward()
            if args.kind == "by-hand":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
